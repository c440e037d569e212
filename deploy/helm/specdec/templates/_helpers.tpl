{{/* What each service is called and where it listens. */}}
{{- define "specdec.facts" -}}
gateway: {port: 50051, healthPort: 50061, service: specdec.v1.GenerationService}
draft: {port: 50052, healthPort: 50062, service: specdec.v1.DraftService}
verifier: {port: 50053, healthPort: 50063, service: specdec.v1.VerifierService}
{{- end }}

{{/* The labels that pods are found by. Takes the root and the component. */}}
{{- define "specdec.selector" -}}
app.kubernetes.io/name: specdec
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* The labels of everything. */}}
{{- define "specdec.labels" -}}
app.kubernetes.io/part-of: specdec
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "specdec.image" -}}
{{ .root.Values.image.repository }}/{{ .name }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{- define "specdec.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* The hub id of a service's model; nothing for the gateway and for the default pair. */}}
{{- define "specdec.model" -}}
{{- if eq .name "verifier" }}{{ .root.Values.models.target }}{{ end }}
{{- if eq .name "draft" }}{{ .root.Values.models.draft }}{{ end }}
{{- end }}

{{/* Settings of a service by their names, as a map. */}}
{{- define "specdec.settings" -}}
{{- $values := index .root.Values .name }}
{{- $facts := index (include "specdec.facts" .root | fromYaml) .name }}
{{- $tls := .root.Values.tls }}
host: 0.0.0.0
port: {{ $facts.port }}
log-format: json
grace-seconds: {{ $values.graceSeconds }}
{{- if eq .name "gateway" }}
verifier-address: dns:{{ .root.Release.Name }}-verifier:50053
draft-address: dns:{{ .root.Release.Name }}-draft:50052
max-connection-age-seconds: 600
{{- if $tls.services }}
peer-tls-ca: /etc/specdec/tls/ca.crt
peer-tls-cert: /etc/specdec/tls/tls.crt
peer-tls-key: /etc/specdec/tls/tls.key
{{- end }}
{{- if .root.Values.apiKeysSecret }}
keys-file: /etc/specdec/keys/keys.yaml
{{- end }}
{{- else }}
{{- with include "specdec.model" . }}
model: {{ . }}
{{- end }}
{{- if and $values.gpus (not .torchrun) }}
device: cuda
{{- end }}
{{- end }}
{{- if .secured }}
tls-cert: /etc/specdec/tls/tls.crt
tls-key: /etc/specdec/tls/tls.key
tls-client-ca: /etc/specdec/tls/ca.crt
health-port: {{ $facts.healthPort }}
{{- if ne .name "gateway" }}
tls-client-names: spiffe://specdec/gateway
max-connection-age-seconds: 3600
{{- end }}
{{- end }}
{{- end }}

{{/*
The spec of a pod.
  root: the chart's context
  name: gateway, draft or verifier
  torchrun: whether it is one of a group
  serves: whether it listens; of a group only the leader does
*/}}
{{- define "specdec.pod" -}}
{{- $values := index .root.Values .name }}
{{- $facts := index (include "specdec.facts" .root | fromYaml) .name }}
{{- $secured := and .serves (ternary .root.Values.tls.clients .root.Values.tls.services (eq .name "gateway")) }}
{{- $holdsTls := and .serves .root.Values.tls.services }}
{{- $modelled := ne .name "gateway" }}
{{- $model := include "specdec.model" . }}
{{- $cached := and $modelled $model .root.Values.modelCache.enabled }}
{{- $settings := include "specdec.settings" (merge (dict "secured" $secured) .) | fromYaml }}
{{- $settings = mergeOverwrite $settings $values.settings }}
{{- $probed := ternary $facts.healthPort $facts.port $secured }}
serviceAccountName: {{ .root.Release.Name }}-{{ .name }}
automountServiceAccountToken: false
{{- /* The variables of a Service named specdec-gateway would look like settings of the gateway. */}}
enableServiceLinks: false
{{- /* preStop, then the grace, then two seconds for what is left, and some to spare. */}}
terminationGracePeriodSeconds: {{ add $values.graceSeconds 15 }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- if and $modelled $values.gpus }}
tolerations:
  - key: nvidia.com/gpu
    operator: Exists
    effect: NoSchedule
{{- end }}
{{- if eq .name "draft" }}
affinity:
  podAffinity:
    {{- if $values.onVerifierNode }}
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels: {{ include "specdec.selector" (dict "root" .root "component" "verifier") | nindent 12 }}
    {{- else }}
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels: {{ include "specdec.selector" (dict "root" .root "component" "verifier") | nindent 14 }}
      - weight: 50
        podAffinityTerm:
          topologyKey: topology.kubernetes.io/zone
          labelSelector:
            matchLabels: {{ include "specdec.selector" (dict "root" .root "component" "verifier") | nindent 14 }}
    {{- end }}
{{- end }}
{{- if not .torchrun }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{ include "specdec.selector" (dict "root" .root "component" .name) | nindent 8 }}
{{- end }}
{{- if and $modelled (not $model) }}
initContainers:
  - name: pull
    image: {{ include "specdec.image" (dict "root" .root "name" "verifier") }}
    command: [specdec, models, pull]
    resources:
      requests: {cpu: "1", memory: 1Gi}
      limits: {memory: 3Gi}
    securityContext: {{ include "specdec.containerSecurity" . | nindent 6 }}
    volumeMounts:
      - {name: cache, mountPath: /cache}
      - {name: tmp, mountPath: /tmp}
{{- else if $cached }}
initContainers:
  - name: download
    image: {{ include "specdec.image" . }}
    # What is there already is only compared; without the hub it is taken as it is.
    command: [hf, download, $(SPECDEC_{{ upper .name }}_MODEL)]
    env:
      - name: SPECDEC_{{ upper .name }}_MODEL
        value: {{ $model }}
      - name: HF_TOKEN
        valueFrom:
          secretKeyRef: {name: {{ .root.Values.hubTokenSecret }}, key: token, optional: true}
    resources:
      requests: {cpu: "1", memory: 2Gi}
      limits: {memory: 8Gi}
    securityContext: {{ include "specdec.containerSecurity" . | nindent 6 }}
    volumeMounts:
      - {name: cache, mountPath: /cache}
      - {name: tmp, mountPath: /tmp}
{{- end }}
containers:
  - name: {{ .name }}
    image: {{ include "specdec.image" . }}
    {{- if .torchrun }}
    command:
      - torchrun
      - --nnodes=$(LWS_GROUP_SIZE)
      - --node-rank=$(LWS_WORKER_INDEX)
      - --nproc-per-node=gpu
      - --master-addr=$(LWS_LEADER_ADDRESS)
      - --master-port=29500
      - -m
      - verifier_service
    {{- end }}
    {{- if .serves }}
    ports:
      - {name: grpc, containerPort: {{ $facts.port }}}
      {{- if $secured }}
      - {name: health, containerPort: {{ $facts.healthPort }}}
      {{- end }}
    {{- end }}
    env:
      {{- range $setting, $value := $settings }}
      - name: SPECDEC_{{ upper $.name }}_{{ upper (replace "-" "_" $setting) }}
        value: {{ $value | quote }}
      {{- end }}
      {{- if $cached }}
      - name: HF_HUB_OFFLINE
        value: "1"
      {{- end }}
    {{- $resources := deepCopy $values.resources }}
    {{- if and $modelled $values.gpus }}
    {{- $resources = merge $resources (dict "limits" (dict "nvidia.com/gpu" $values.gpus)) }}
    {{- end }}
    resources: {{ toYaml $resources | nindent 6 }}
    securityContext: {{ include "specdec.containerSecurity" . | nindent 6 }}
    lifecycle:
      preStop:
        # New connections stop coming before the service begins to refuse them.
        sleep: {seconds: 5}
    {{- if .serves }}
    # Alive from when it listens, which is some seconds after the start: PyTorch is imported.
    startupProbe:
      grpc: {port: {{ $probed }}}
      periodSeconds: 2
      timeoutSeconds: 2
      failureThreshold: 90
    livenessProbe:
      grpc: {port: {{ $probed }}}
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: 3
    readinessProbe:
      grpc: {port: {{ $probed }}, service: {{ $facts.service }}}
      periodSeconds: 2
      timeoutSeconds: 2
      failureThreshold: 2
    {{- end }}
    volumeMounts:
      {{- if $modelled }}
      - name: cache
        mountPath: /cache
        {{- if $cached }}
        readOnly: true
        {{- end }}
      {{- end }}
      - {name: tmp, mountPath: /tmp}
      {{- if .torchrun }}
      - {name: shm, mountPath: /dev/shm}
      {{- end }}
      {{- if $holdsTls }}
      - {name: tls, mountPath: /etc/specdec/tls, readOnly: true}
      {{- end }}
      {{- if and (eq .name "gateway") .root.Values.apiKeysSecret }}
      - {name: api-keys, mountPath: /etc/specdec/keys, readOnly: true}
      {{- end }}
volumes:
  {{- if $cached }}
  - name: cache
    persistentVolumeClaim: {claimName: {{ .root.Release.Name }}-model-cache}
  {{- else if $modelled }}
  - name: cache
    emptyDir: {}
  {{- end }}
  - name: tmp
    emptyDir: {sizeLimit: 1Gi}
  {{- if .torchrun }}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: 16Gi}
  {{- end }}
  {{- if $holdsTls }}
  - name: tls
    secret: {secretName: {{ .root.Release.Name }}-{{ .name }}-tls, defaultMode: 0440}
  {{- end }}
  {{- if and (eq .name "gateway") .root.Values.apiKeysSecret }}
  - name: api-keys
    secret: {secretName: {{ .root.Values.apiKeysSecret }}, defaultMode: 0440}
  {{- end }}
{{- end }}
