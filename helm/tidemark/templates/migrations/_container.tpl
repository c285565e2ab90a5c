{{/* Brings the schema up to date. Waits for Postgres: as a hook for a time, as an init container for ever. */}}
{{- define "tidemark.migrations.container" -}}
- name: migrate
  {{- include "tidemark.serviceContainer" . | nindent 2 }}
  args: [migrate, --wait, {{ ternary (.Values.migrations.timeoutSeconds | toString) "inf" (eq .Values.migrations.mode "hook") | quote }}]
  env:
    {{- include "tidemark.env" (dict "root" . "role" "migrations") | trim | nindent 4 }}
    {{- with .Values.hooks.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  resources:
    {{- toYaml .Values.migrations.resources | nindent 4 }}
  volumeMounts:
    - name: migrations-tmp
      mountPath: /tmp
    {{- with include "tidemark.secretMount" (dict "root" . "role" "migrations") }}
    {{- . | nindent 4 }}
    {{- end }}
{{- end -}}

{{- define "tidemark.migrations.volumes" -}}
- name: migrations-tmp
  emptyDir:
    sizeLimit: 64Mi
{{- with include "tidemark.secretVolume" (dict "root" . "role" "migrations") }}
{{ . }}
{{- end }}
{{- end -}}
