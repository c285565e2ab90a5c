{{/* Where the checkpoint is: below a mount's root, because it is renamed when it is set aside. */}}
{{- define "tidemark.checkpoint" -}}
{{- if eq .Values.checkpoint.type "persistentVolumeClaim" -}}
/checkpoint/tidemark
{{- else -}}
/var/lib/tidemark/checkpoint
{{- end -}}
{{- end -}}
