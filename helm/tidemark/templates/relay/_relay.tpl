{{/* One of relay.databases with its defaults, as YAML: (dict "root" $ "database" .) */}}
{{- define "tidemark.relay.of" -}}
{{- toYaml (mergeOverwrite (deepCopy .root.Values.relay.defaults) .database) -}}
{{- end -}}

{{- define "tidemark.relay.name" -}}
{{- printf "%s-relay-%s" (include "tidemark.fullname" .root) .database.name -}}
{{- end -}}

{{/* The container: (dict "root" $ "role" "relay" "database" .) with the defaults in it, and what it is started with. */}}
{{- define "tidemark.relay.container" -}}
{{- include "tidemark.serviceContainer" .root }}
{{- if .hook }}
{{ include "tidemark.hookCommand" . }}
{{- end }}
args:
  {{- toYaml .args | nindent 2 }}
env:
  {{- include "tidemark.env" . | trim | nindent 2 }}
  {{- with concat .database.extraEnv (ternary .root.Values.hooks.extraEnv list (eq .role "relay-migrations")) }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .database.envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
resources:
  {{- toYaml .database.resources | nindent 2 }}
volumeMounts:
  - name: tmp
    mountPath: /tmp
  {{- with include "tidemark.secretMount" . }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with .database.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- define "tidemark.relay.volumes" -}}
- name: tmp
  emptyDir:
    sizeLimit: 64Mi
{{- with include "tidemark.secretVolume" . }}
{{ . }}
{{- end }}
{{- with .database.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}
