{{/*
The sidecar as a container: in the pipeline's pod, in the Deployment, and in pods of yours. With this chart among the
dependencies of your own (and pipeline.enabled: false, sidecar.replicas: 0 where it shall bring nothing else):

    initContainers:
      {{- include "tidemark.sidecar.native" .Subcharts.tidemark | nindent 8 }}
    volumes:
      {{- include "tidemark.sidecar.volumes" .Subcharts.tidemark | nindent 8 }}

Your containers then ask http://127.0.0.1:9480 (https with sidecar.tls). The pod needs fsGroup 10001 where secrets are mounted.
*/}}
{{- define "tidemark.sidecar.container" -}}
- name: sidecar
  {{- include "tidemark.serviceContainer" . | nindent 2 }}
  args: [sidecar]
  env:
    {{- include "tidemark.env" (dict "root" . "role" "sidecar") | trim | nindent 4 }}
    - name: TIDEMARK_SIDECAR_HOST
      value: {{ .Values.network.listen | quote }}
    - name: TIDEMARK_SIDECAR_PORT
      value: "9480"
    {{- with .Values.sidecar.cors }}
    - name: TIDEMARK_SIDECAR_CORS_ORIGINS
      value: {{ . | quote }}
    {{- end }}
    {{- if .Values.sidecar.tokensSecret.name }}
    - name: TIDEMARK_SIDECAR_TOKENS_FILE
      value: /etc/tidemark/secrets/sidecar/tokens
    {{- end }}
    {{- if .Values.sidecar.tls.secret.name }}
    - name: TIDEMARK_SIDECAR_CERTIFICATE_FILE
      value: /etc/tidemark/secrets/sidecar/tls.crt
    - name: TIDEMARK_SIDECAR_KEY_FILE
      value: /etc/tidemark/secrets/sidecar/tls.key
    {{- end }}
    {{- with .Values.sidecar.lines }}
    {{- if .enabled }}
    - name: TIDEMARK_LINES_LISTEN
      value: {{ include "tidemark.listen" (dict "root" $ "port" 9481) | quote }}
    {{- end }}
    {{- if include "tidemark.speaksLines" $ }}
    - name: TIDEMARK_LINES_SERVER_NAME
      value: {{ .serverName | quote }}
    {{- end }}
    {{- with .channel }}
    - name: TIDEMARK_LINES_REDIS_CHANNEL
      value: {{ . | quote }}
    {{- end }}
    {{- end }}
    {{- with .Values.sidecar.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .Values.sidecar.envFrom }}
  envFrom:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  ports:
    - name: http
      containerPort: 9480
    {{- if .Values.sidecar.lines.enabled }}
    - name: lines
      containerPort: 9481
    {{- end }}
  startupProbe:
    httpGet: {path: /livez, port: http, scheme: {{ include "tidemark.sidecar.scheme" . | upper }}}
    periodSeconds: 1
    failureThreshold: 60
  livenessProbe:
    httpGet: {path: /livez, port: http, scheme: {{ include "tidemark.sidecar.scheme" . | upper }}}
    periodSeconds: 10
    timeoutSeconds: 3
  readinessProbe:
    httpGet: {path: /readyz, port: http, scheme: {{ include "tidemark.sidecar.scheme" . | upper }}}
    periodSeconds: 5
    timeoutSeconds: 3
  lifecycle:
    preStop:
      # The sidecar serves until no new client is sent to it; then it sends the clients that are left to other sidecars.
      exec: {command: [sleep, "5"]}
  resources:
    {{- toYaml .Values.sidecar.resources | nindent 4 }}
  volumeMounts:
    - name: sidecar-tmp
      mountPath: /tmp
    {{- with include "tidemark.secretMount" (dict "root" . "role" "sidecar") }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with .Values.sidecar.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* http, or https where it has a certificate. */}}
{{- define "tidemark.sidecar.scheme" -}}
{{- ternary "https" "http" (ne .Values.sidecar.tls.secret.name "") -}}
{{- end -}}

{{/* The name that its certificate must have. */}}
{{- define "tidemark.sidecar.serverName" -}}
{{- .Values.sidecar.tls.serverName | default (printf "%s.%s.svc" (include "tidemark.fullname" .) .Release.Namespace) -}}
{{- end -}}

{{/* How it is scraped, as part of an endpoint of a monitor. */}}
{{- define "tidemark.sidecar.scraped" -}}
scheme: {{ include "tidemark.sidecar.scheme" . }}
{{- if .Values.sidecar.tokensSecret.name }}
authorization:
  credentials: {name: {{ .Values.monitoring.sidecarTokenSecret.name }}, key: {{ .Values.monitoring.sidecarTokenSecret.key }}}
{{- end }}
{{- if .Values.sidecar.tls.secret.name }}
tlsConfig:
  serverName: {{ include "tidemark.sidecar.serverName" . }}
  {{- with .Values.sidecar.tls.caSecret }}
  {{- if .name }}
  ca:
    secret: {name: {{ .name }}, key: {{ .key }}}
  {{- end }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* As an init container that stays: it starts before the pod's own containers and ends after them. */}}
{{- define "tidemark.sidecar.native" -}}
{{ include "tidemark.sidecar.container" . }}
  restartPolicy: Always
{{- end -}}

{{- define "tidemark.sidecar.volumes" -}}
- name: sidecar-tmp
  emptyDir:
    sizeLimit: 64Mi
{{- with include "tidemark.secretVolume" (dict "root" . "role" "sidecar") }}
{{ . }}
{{- end }}
{{- with .Values.sidecar.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}
