{{- define "penstock.apiKeys" -}}
{{ .Values.apiKeys.existingSecret | default (ternary (printf "%s-api-keys" (include "penstock.name" .)) "" (not (empty .Values.apiKeys.values))) }}
{{- end }}

{{- define "penstock.clusterSecret" -}}
{{ .Values.clusterSecret.existingSecret | default (printf "%s-cluster" (include "penstock.name" .)) }}
{{- end }}

{{- /* Data of the generated cluster secret in base64: that in the cluster, or else random. The same in all templates of a rendering. */ -}}
{{- define "penstock.generatedClusterSecret" -}}
{{- if not (hasKey .Values.clusterSecret "generated") }}
{{- $kept := (lookup "v1" "Secret" .Release.Namespace (include "penstock.clusterSecret" .)).data | default dict }}
{{- $_ := set .Values.clusterSecret "generated" (index $kept "cluster-secret" | default (randAlphaNum 64 | b64enc)) }}
{{- end }}
{{- .Values.clusterSecret.generated }}
{{- end }}

{{- /* Names of the secrets and ConfigMaps that env and extraVolumes use: a list of kind/name. */ -}}
{{- define "penstock.references" -}}
{{- $found := list }}
{{- range .Values.env }}
{{- with (.valueFrom).secretKeyRef }}{{ $found = append $found (printf "Secret/%s" .name) }}{{ end }}
{{- with (.valueFrom).configMapKeyRef }}{{ $found = append $found (printf "ConfigMap/%s" .name) }}{{ end }}
{{- end }}
{{- range .Values.extraVolumes }}
{{- with .secret }}{{ $found = append $found (printf "Secret/%s" .secretName) }}{{ end }}
{{- with .configMap }}{{ $found = append $found (printf "ConfigMap/%s" .name) }}{{ end }}
{{- end }}
{{- range list .Values.apiKeys.existingSecret .Values.huggingFace.existingSecret .Values.tls.existingSecret }}
{{- with . }}{{ $found = append $found (printf "Secret/%s" .) }}{{ end }}
{{- end }}
{{- with .Values.clusterSecret.existingSecret }}
{{- if $.Values.prefillDecode.enabled }}{{ $found = append $found (printf "Secret/%s" .) }}{{ end }}
{{- end }}
{{- $found | uniq | sortAlpha | toJson }}
{{- end }}

{{- /*
Checksums of the options, secrets and ConfigMaps of a pod: a change replaces the pods. Existing objects are read from the cluster, which
helm template does not do: there, only their names count.
*/ -}}
{{- define "penstock.checksums" -}}
{{- $secrets := dict "api-keys" .Values.apiKeys.values }}
{{- if and .Values.prefillDecode.enabled (not .Values.clusterSecret.existingSecret) }}
{{- $_ := set $secrets "cluster-secret" (include "penstock.generatedClusterSecret" .) }}
{{- end }}
{{- $maps := dict }}
{{- range include "penstock.references" . | fromJsonArray }}
{{- $parts := splitn "/" 2 . }}
{{- $object := lookup "v1" $parts._0 $.Release.Namespace $parts._1 }}
{{- $data := dict "data" $object.data "binaryData" $object.binaryData }}
{{- $_ := set (ternary $secrets $maps (eq $parts._0 "Secret")) . $data }}
{{- end -}}
checksum/options: {{ toYaml .Values.options | sha256sum }}
checksum/secrets: {{ toJson $secrets | sha256sum }}
{{- if $maps }}
checksum/config-maps: {{ toJson $maps | sha256sum }}
{{- end }}
{{- end }}
