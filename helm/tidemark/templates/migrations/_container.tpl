{{/* Brings the schema up to date, as an init container. Waits for Postgres; what a person must mend (code 2) ends it. */}}
{{- define "tidemark.migrations.container" -}}
- name: migrate
  {{- include "tidemark.containerBasics" . | nindent 2 }}
  command: [tini, --, sh, -c]
  args:
    - until tidemark migrate; do [ $? -ne 2 ] || exit 2; sleep 1; done
  env:
    {{- include "tidemark.env" (dict "root" . "role" "migrations") | trim | nindent 4 }}
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
