{{/*
The template of a workload's pods.  Takes root, fleet, workload, and follower: whether it is for the other pods of each
worker, which has one for each stage of its model, or for each node of its group.
*/}}
{{- define "penstock.podTemplate" -}}
{{- $root := .root -}}
{{- $workload := .workload -}}
{{- $models := include "penstock.models" $root | fromYaml -}}
metadata:
  labels:
    {{- include "penstock.labels" (dict "root" $root "component" $workload.component) | nindent 4 }}
    penstock-workload: {{ $workload.name | quote }}
    {{- if and $workload.worker (not .follower) }}
    penstock-member: "true"
    {{- end }}
  annotations:
    penstock-settings: {{ $workload.config | sha256sum | trunc 16 | quote }}
spec:
  {{- include "penstock.podFrame" (dict "name" $workload.name "graceS" $workload.graceS) | nindent 2 }}
  initContainers:
    # Keys that others can read are refused, and files of Secrets are the group's, too.
    - name: keys
      image: {{ include "penstock.image" $root | quote }}
      command:
        - sh
        - -ec
        - |
          {{- range $workload.secrets }}
          mkdir -p -m 0700 /keys/{{ . }} && install -m 0600 -t /keys/{{ . }} /secrets/{{ . }}/*
          {{- end }}
      resources:
        requests: {cpu: 100m, memory: 64Mi}
        limits: {memory: 64Mi}
      securityContext:
        {{- include "penstock.lockedDown" . | nindent 8 }}
      volumeMounts:
        - {name: keys, mountPath: /keys}
        {{- range $workload.secrets }}
        - {name: secret-{{ . }}, mountPath: /secrets/{{ . }}, readOnly: true}
        {{- end }}
  containers:
    - name: penstock
      image: {{ include "penstock.image" $root | quote }}
      args:
        {{- include (ternary "penstock.workerArgs" "penstock.gatewayArgs" $workload.worker) . | nindent 8 }}
      # No limit of processors: a throttled worker stands still for the rest of each period.
      resources:
        requests:
          cpu: {{ $workload.cpu | quote }}
          {{- include "penstock.limits" $workload | nindent 10 }}
        limits:
          {{- include "penstock.limits" $workload | nindent 10 }}
      securityContext:
        {{- include "penstock.lockedDown" . | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: settings, mountPath: /etc/penstock, readOnly: true}
        - {name: keys, mountPath: /keys, readOnly: true}
        {{- with $models }}
        - {name: models, mountPath: {{ .path | quote }}, readOnly: true}
        {{- end }}
        {{- range $number, $path := $workload.written }}
        - {name: written-{{ $number }}, mountPath: {{ $path | quote }}}
        {{- end }}
      {{- if $workload.worker }}
      {{- include "penstock.workerContainer" . | nindent 6 }}
      {{- else }}
      {{- include "penstock.gatewayContainer" . | nindent 6 }}
      {{- end }}
  volumes:
    - {name: tmp, emptyDir: {}}
    - {name: settings, configMap: {name: {{ printf "%s-settings" .fleet.name | quote }}}}
    - {name: keys, emptyDir: {medium: Memory, sizeLimit: 1Mi}}
    {{- range $workload.secrets }}
    - name: secret-{{ . }}
      secret:
        secretName: {{ include "penstock.secretName" (dict "root" $root "secret" .) | quote }}
        defaultMode: 0440
    {{- end }}
    {{- with $models }}
    - name: models
      {{- toYaml .volume | nindent 6 }}
    {{- end }}
    {{- range $number, $path := $workload.written }}
    - {name: written-{{ $number }}, emptyDir: {}}
    {{- end }}
{{- end }}

{{/*
What the pods of every workload have around their containers.  Takes name (of the workload) and graceS.
*/}}
{{- define "penstock.podFrame" -}}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .graceS }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {penstock-workload: {{ .name | quote }}}
# Answers go on elsewhere within seconds; a lost host's pods are replaced after half a minute, not five.
tolerations:
  - {key: node.kubernetes.io/not-ready, operator: Exists, effect: NoExecute, tolerationSeconds: 30}
  - {key: node.kubernetes.io/unreachable, operator: Exists, effect: NoExecute, tolerationSeconds: 30}
{{- end }}

{{- define "penstock.lockedDown" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "penstock.limits" -}}
memory: {{ .memory | quote }}
{{- if .gpus }}
nvidia.com/gpu: {{ .gpus }}
{{- end }}
{{- end }}

{{/*
Where pods have models (path), and the volume; nothing for the bundled model, or one of the Hub.
*/}}
{{- define "penstock.models" -}}
{{- $options := .Values.kubernetes -}}
{{- $model := .Values.model | default "" -}}
{{- $path := $options.models_path | default "" -}}
{{- if and (not $path) (regexMatch "^[/.~]" $model) -}}
{{- if not (hasPrefix "/" $model) -}}
{{- fail (printf "model = %q: pods have no such folder; give an absolute path" $model) -}}
{{- end -}}
{{- $path = dir (clean $model) -}}
{{- end -}}
{{- if $path -}}
path: {{ $path | quote }}
volume:
  {{- if $options.models_claim }}
  persistentVolumeClaim: {claimName: {{ $options.models_claim | quote }}, readOnly: true}
  {{- else }}
  hostPath: {path: {{ $path | quote }}, type: Directory}
  {{- end }}
{{- end -}}
{{- end }}

{{- define "penstock.gatewayArgs" -}}
- serve
{{- with .root.Values.model }}
- {{ . | quote }}
{{- end }}
- --config
- {{ printf "/etc/penstock/%s.toml" .workload.name | quote }}
- --host
- 0.0.0.0
- --port
- "8000"
- --members
- {{ printf "dns:%s-workers:9000" .fleet.name | quote }}
- --keys
- /keys/host-keys
{{- end }}

{{- define "penstock.workerArgs" -}}
- worker
{{- with .root.Values.model }}
- {{ . | quote }}
{{- end }}
- --config
- {{ printf "/etc/penstock/%s.toml" .workload.name | quote }}
- --role
- {{ .workload.component }}
- --keys
- /keys/host-keys
{{- if ne .workload.mesh "tp1" }}
- --parallel
- {{ .workload.mesh }}
{{- end }}
{{- if gt (int .workload.machines) 1 }}
- --nnodes
- {{ .workload.machines | quote }}
# Other pods reach ranks of the first one at the address that it listens at, so 0.0.0.0 would not do.
- --master-addr
- tcp://{{ ternary "$(LWS_LEADER_ADDRESS)" "$(POD_IP)" .follower }}:9100
- --node-rank
- {{ ternary "$(LWS_WORKER_INDEX)" "0" .follower | quote }}
{{- end }}
{{- if not .follower }}
- --listen
- tcp://0.0.0.0:9000
- --pages-port
- "9001"
- --name
- $(POD_NAME)
{{- end }}
{{- end }}

{{- define "penstock.gatewayContainer" -}}
{{- if not .fleet.ownKeys -}}
env:
  - name: PENSTOCK_API_KEY
    valueFrom:
      secretKeyRef:
        name: {{ include "penstock.secretName" (dict "root" .root "secret" "api-key") | quote }}
        key: api-key
{{ end -}}
ports:
  - {name: http, containerPort: 8000}
startupProbe:
  httpGet: {{ include "penstock.httpGet" (dict "workload" .workload "path" "/version") }}
  periodSeconds: 2
  failureThreshold: 150
readinessProbe:
  httpGet: {{ include "penstock.httpGet" (dict "workload" .workload "path" "/ready") }}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
livenessProbe:
  httpGet: {{ include "penstock.httpGet" (dict "workload" .workload "path" "/health") }}
  periodSeconds: 10
  timeoutSeconds: 5
  # Requests without a worker fail after no_path_s; only a gateway that is stuck for longer is at fault itself.
  failureThreshold: {{ max 6 (divf (addf .fleet.noPathS 30) 10 | ceil | int) }}
lifecycle:
  preStop:
    # For proxies to hear that it leaves the Service, before its port is closed.
    exec: {command: [sleep, "5"]}
{{- end }}

{{- define "penstock.httpGet" -}}
{path: {{ .path }}, port: http{{ if has "tls" .workload.secrets }}, scheme: HTTPS{{ end }}}
{{- end }}

{{- define "penstock.workerContainer" -}}
env:
  - name: POD_NAME
    valueFrom:
      fieldRef: {fieldPath: metadata.name}
  - name: POD_IP
    valueFrom:
      fieldRef: {fieldPath: status.podIP}
{{- if not .follower }}
ports:
  - {name: worker, containerPort: 9000}
  - {name: pages, containerPort: 9001}
  {{- if gt (int .workload.machines) 1 }}
  - {name: master, containerPort: 9100}
  {{- end }}
startupProbe:
  exec:
    command: [penstock, probe, --ready, --keys, /keys/host-keys, "tcp://127.0.0.1:9000"]
  timeoutSeconds: 10
  periodSeconds: 5
  failureThreshold: 720  # an hour: the supervisor itself ends a start that makes no progress (start_s)
readinessProbe:
  exec:
    command: [penstock, probe, --ready, --keys, /keys/host-keys, "tcp://127.0.0.1:9000"]
  timeoutSeconds: 10
  periodSeconds: 10
  failureThreshold: 3
livenessProbe:
  exec:
    command: [penstock, probe, --live, --keys, /keys/host-keys, "tcp://127.0.0.1:9000"]
  timeoutSeconds: 10
  periodSeconds: 10
  failureThreshold: 9  # the supervisor in the pod replaces a hung process itself, after 60 s at the latest
{{- end }}
{{- end }}
