{{- define "penstock.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "penstock.selector" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- /* Roles of this release, with replicas and resources. */ -}}
{{- define "penstock.roles" -}}
{{- if .Values.prefillDecode.enabled }}
{{- range $role := list "router" "prefill" "decode" }}
{{- $own := index $.Values.prefillDecode $role }}
{{ $role }}:
  replicas: {{ $own.replicas | default 1 }}
  resources: {{ $own.resources | default $.Values.resources | toJson }}
{{- end }}
{{- else }}
mixed:
  replicas: {{ .Values.replicas }}
  resources: {{ .Values.resources | toJson }}
{{- end }}
{{- end }}

{{- define "penstock.workload" -}}
{{ include "penstock.name" .root }}{{ if ne .role "mixed" }}-{{ .role }}{{ end }}
{{- end }}

{{- /* Role that serves clients. */ -}}
{{- define "penstock.front" -}}
{{ ternary "router" "mixed" .Values.prefillDecode.enabled }}
{{- end }}

{{- define "penstock.apiKeys" -}}
{{ .Values.apiKeys.existingSecret | default (ternary (printf "%s-api-keys" (include "penstock.name" .)) "" (not (empty .Values.apiKeys.values))) }}
{{- end }}

{{- define "penstock.clusterSecret" -}}
{{ .Values.clusterSecret.existingSecret | default (printf "%s-cluster" (include "penstock.name" .)) }}
{{- end }}

{{- define "penstock.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}
