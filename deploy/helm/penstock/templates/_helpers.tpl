{{- define "penstock.chart" -}}
{{ .Values.nameOverride | default .Chart.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- /* Name of the objects; others are this name with a suffix. */ -}}
{{- define "penstock.name" -}}
{{- $chart := include "penstock.chart" . }}
{{- $both := ternary .Release.Name (printf "%s-%s" .Release.Name $chart) (contains $chart .Release.Name) }}
{{- .Values.fullnameOverride | default $both | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "penstock.selector" -}}
app.kubernetes.io/name: {{ include "penstock.chart" . }}
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
{{- $gpus := ternary dict (dict "limits" (dict .Values.gpu.resource .Values.gpu.count)) (eq (int .Values.gpu.count) 0) }}
{{- if .Values.prefillDecode.enabled }}
{{- range $role := list "router" "prefill" "decode" }}
{{- $own := index $.Values.prefillDecode $role }}
{{- $resources := $own.resources | default $.Values.resources }}
{{ $role }}:
  replicas: {{ $own.replicas | default 1 }}
  resources: {{ ternary $resources (merge (deepCopy $resources) $gpus) (eq $role "router") | toJson }}
{{- end }}
{{- else }}
mixed:
  replicas: {{ .Values.replicas }}
  resources: {{ merge (deepCopy .Values.resources) $gpus | toJson }}
{{- end }}
{{- end }}

{{- define "penstock.workload" -}}
{{ include "penstock.name" .root }}{{ if ne .role "mixed" }}-{{ .role }}{{ end }}
{{- end }}

{{- /* Role that serves clients. */ -}}
{{- define "penstock.front" -}}
{{ ternary "router" "mixed" .Values.prefillDecode.enabled }}
{{- end }}

{{- /* "true" if the limits in resources have GPUs: the resource gpu.resource, or one called nvidia.com/… or …/gpu. */ -}}
{{- define "penstock.hasGpus" -}}
{{- range $name, $count := (.resources.limits | default dict) }}
{{- if and (or (eq $name $.root.Values.gpu.resource) (regexMatch "^nvidia\\.com/|/gpu$" $name)) (ne (toString $count) "0") }}true{{ end }}
{{- end }}
{{- end }}

{{- /* "true" if the cache's claim can be used by the pods of one node only. */ -}}
{{- define "penstock.singleNodeClaim" -}}
{{- if and .Values.persistence.enabled (not (has "ReadWriteMany" .Values.persistence.accessModes)) }}true{{ end }}
{{- end }}

{{- /* Update strategy of a Deployment, see strategy in values.yaml; arguments: root, role, replicas and resources. */ -}}
{{- define "penstock.strategy" -}}
{{- $scaled := and (or .root.Values.autoscaling.enabled .root.Values.keda.enabled) (ne .role "router") }}
{{- if .root.Values.strategy }}
{{- toYaml .root.Values.strategy }}
{{- else if include "penstock.singleNodeClaim" .root }}
{{- include "penstock.recreate" . }}
{{- else if include "penstock.hasGpus" . }}
{{- if or $scaled (gt (int .replicas) 1) }}
{{- "type: RollingUpdate\nrollingUpdate: {maxSurge: 0, maxUnavailable: 1}" }}
{{- else }}
{{- include "penstock.recreate" . }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Without null, an upgrade keeps the default rollingUpdate of a Deployment, which Kubernetes refuses with Recreate. */ -}}
{{- define "penstock.recreate" -}}
type: Recreate
rollingUpdate: null
{{- end }}

{{- /* Image of a container with the given resources. */ -}}
{{- define "penstock.image" -}}
{{- $image := .root.Values.image }}
{{- if $image.digest }}
{{- $image.repository }}@{{ $image.digest }}
{{- else }}
{{- $image.repository }}:{{ $image.tag | default (ternary "cuda" "cpu" (eq (include "penstock.gpuRelease" .root) "true")) }}
{{- end }}
{{- end }}

{{- /* "true" if any role has GPUs. */ -}}
{{- define "penstock.gpuRelease" -}}
{{- $found := "" }}
{{- range $role, $own := include "penstock.roles" . | fromYaml }}
{{- if contains "true" (include "penstock.hasGpus" (dict "root" $ "resources" $own.resources)) }}{{ $found = "true" }}{{ end }}
{{- end }}
{{- $found }}
{{- end }}

{{- define "penstock.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (ternary (include "penstock.name" .) "" .Values.serviceAccount.create) }}
{{- end }}

{{- define "penstock.scheme" -}}
{{ ternary "HTTPS" "HTTP" (not (empty .Values.tls.existingSecret)) }}
{{- end }}

{{- define "penstock.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}
