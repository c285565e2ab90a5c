{{/* Brings the schema up to date. Waits for Postgres: as a hook for a time, as an init container for ever. */}}
{{- define "tidemark.migrations.container" -}}
{{- $hook := eq .Values.migrations.mode "hook" }}
{{- $role := dict "root" . "role" "migrations" "hook" $hook "program" (list "tidemark") -}}
- name: migrate
  {{- include "tidemark.serviceContainer" . | nindent 2 }}
  {{- if $hook }}
  {{- include "tidemark.hookCommand" $role | nindent 2 }}
  {{- end }}
  args: [migrate, --wait, {{ ternary (include "tidemark.text" .Values.migrations.timeoutSeconds) "inf" (eq .Values.migrations.mode "hook") | quote }}]
  env:
    {{- include "tidemark.env" $role | trim | nindent 4 }}
    {{- with .Values.hooks.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  resources:
    {{- toYaml .Values.migrations.resources | nindent 4 }}
  volumeMounts:
    - name: migrations-tmp
      mountPath: /tmp
    {{- with include "tidemark.secretMount" $role }}
    {{- . | nindent 4 }}
    {{- end }}
{{- end -}}

{{- define "tidemark.migrations.volumes" -}}
- name: migrations-tmp
  emptyDir:
    sizeLimit: 64Mi
{{- with include "tidemark.secretVolume" (dict "root" . "role" "migrations" "hook" (eq .Values.migrations.mode "hook")) }}
{{ . }}
{{- end }}
{{- end -}}
