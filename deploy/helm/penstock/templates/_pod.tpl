{{- /* Pod specification; arguments: root, role and resources. */ -}}
{{- define "penstock.pod" -}}
{{- $values := .root.Values -}}
{{- $apart := ne .role "mixed" -}}
{{- $instance := and $apart (ne .role "router") -}}
{{- $image := include "penstock.image" . -}}
{{- $front := eq .role (include "penstock.front" .root) -}}
{{- $download := and $values.modelDownload.enabled (ne .role "router") -}}
{{- with include "penstock.serviceAccount" .root | trim -}}
serviceAccountName: {{ . }}
{{ end -}}
automountServiceAccountToken: {{ $values.serviceAccount.automount }}
{{- if and $values.runtimeClassName (ne .role "router") }}
runtimeClassName: {{ $values.runtimeClassName }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
enableServiceLinks: false
terminationGracePeriodSeconds: {{ $values.terminationGracePeriod }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with $values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if or $apart $download $values.initContainers }}
initContainers:
  {{- with $values.initContainers }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- if $apart }}
  # A secret's volume is owned by root and readable by its group, and cluster secrets with such permissions are rejected.
  - name: cluster-secret
    image: {{ $image }}
    imagePullPolicy: {{ $values.image.pullPolicy }}
    command: [install, -m, "400", /secret/cluster-secret, /run/penstock/cluster-secret]
    securityContext:
      {{- include "penstock.securityContext" .root | nindent 6 }}
    volumeMounts:
      - {name: cluster-secret, mountPath: /secret, readOnly: true}
      - {name: run, mountPath: /run/penstock}
  {{- end }}
  {{- if $download }}
  - name: download
    image: {{ $image }}
    imagePullPolicy: {{ $values.image.pullPolicy }}
    args: [download, {{ include "penstock.downloadedModel" .root | quote }}, --config=/etc/penstock/penstock.yaml]
    {{- with include "penstock.env" . | trim }}
    env:
      {{- . | nindent 6 }}
    {{- end }}
    resources:
      {{- toYaml .resources | nindent 6 }}
    securityContext:
      {{- include "penstock.securityContext" .root | nindent 6 }}
    volumeMounts:
      {{- include "penstock.mounts" . | nindent 6 }}
  {{- end }}
{{- end }}
containers:
  - name: penstock
    image: {{ $image }}
    imagePullPolicy: {{ $values.image.pullPolicy }}
    args:
      - serve
      - --config=/etc/penstock/penstock.yaml
      - --host=0.0.0.0
      - --port=8000
      - --drain-timeout={{ $values.drainTimeout }}
      {{- if $apart }}
      - --role={{ .role }}
      - --cluster-secret-file=/run/penstock/cluster-secret
      {{- end }}
      {{- if $instance }}
      - --router-address={{ ternary "https://" "" (not (empty $values.tls.existingSecret)) }}{{ include "penstock.name" .root }}-router:8000
      - --engine-address=$(POD_IP):8100
      {{- end }}
      {{- if $values.tls.existingSecret }}
      - --ssl-certfile=/run/penstock-tls/tls.crt
      - --ssl-keyfile=/run/penstock-tls/tls.key
      {{- end }}
      {{- if and $front $values.service.grpcPort }}
      - --grpc-port={{ $values.service.grpcPort }}
      {{- end }}
    {{- with include "penstock.env" . | trim }}
    env:
      {{- . | nindent 6 }}
    {{- end }}
    ports:
      - {name: http, containerPort: 8000}
      {{- if $instance }}
      - {name: engine, containerPort: 8100}
      {{- end }}
      {{- if and $front $values.service.grpcPort }}
      - {name: grpc, containerPort: {{ $values.service.grpcPort }}}
      {{- end }}
    startupProbe:
      httpGet: {path: /live, port: http, scheme: {{ include "penstock.scheme" .root }}}
      periodSeconds: 5
      failureThreshold: {{ div (add $values.startupTimeout 4) 5 }}
    livenessProbe:
      httpGet: {path: /live, port: http, scheme: {{ include "penstock.scheme" .root }}}
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: 6
    readinessProbe:
      httpGet: {path: /ready, port: http, scheme: {{ include "penstock.scheme" .root }}}
      periodSeconds: 5
      timeoutSeconds: 5
      failureThreshold: 2
    lifecycle:
      preStop: {exec: {command: [sleep, {{ $values.preStopSleep | quote }}]}}
    resources:
      {{- toYaml .resources | nindent 6 }}
    securityContext:
      {{- include "penstock.securityContext" .root | nindent 6 }}
    volumeMounts:
      {{- include "penstock.mounts" . | nindent 6 }}
      {{- if $apart }}
      - {name: run, mountPath: /run/penstock, readOnly: true}
      {{- end }}
volumes:
  - name: options
    configMap: {name: {{ include "penstock.name" .root }}}
  - name: cache
    {{- if $values.persistence.enabled }}
    persistentVolumeClaim: {claimName: {{ $values.persistence.existingClaim | default (printf "%s-cache" (include "penstock.name" .root)) }}}
    {{- else }}
    emptyDir: {}
    {{- end }}
  - name: tmp
    emptyDir: {}
  - name: shm
    emptyDir: {medium: Memory}
  {{- with $values.models.existingClaim }}
  - name: models
    persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
  {{- end }}
  {{- if $apart }}
  - name: run
    emptyDir: {medium: Memory}
  - name: cluster-secret
    secret: {secretName: {{ include "penstock.clusterSecret" .root }}}
  {{- end }}
  {{- with $values.tls.existingSecret }}
  - name: tls
    secret: {secretName: {{ . }}, defaultMode: 0440}
  {{- end }}
  {{- with $values.extraVolumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- range $field := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" }}
{{- with index $values $field }}
{{ $field }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

{{- define "penstock.env" -}}
{{- $values := .root.Values -}}
{{- if has .role (list "prefill" "decode") }}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end }}
{{- with include "penstock.apiKeys" .root }}
- name: PENSTOCK_API_KEY
  valueFrom: {secretKeyRef: {name: {{ . }}, key: api-keys}}
{{- end }}
{{- with $values.huggingFace.existingSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}
{{- end }}
{{- with $values.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* Mounts of the server and of the download before it. */ -}}
{{- define "penstock.mounts" -}}
{{- $values := .root.Values -}}
- {name: options, mountPath: /etc/penstock, readOnly: true}
- {name: cache, mountPath: /home/penstock/.cache}
- {name: tmp, mountPath: /tmp}
- {name: shm, mountPath: /dev/shm}
{{- if $values.models.existingClaim }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- if $values.tls.existingSecret }}
- {name: tls, mountPath: /run/penstock-tls, readOnly: true}
{{- end }}
{{- with $values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "penstock.downloadedModel" -}}
{{- $model := .Values.options.model | default "" }}
{{- if or (eq $model "") (hasPrefix "/" $model) }}
{{- fail (printf "modelDownload needs a model that can be downloaded, such as org/name; options.model is %q" $model) }}
{{- end }}
{{- $model }}
{{- end }}
