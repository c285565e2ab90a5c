{{/* An endpoint of a monitor: (dict "root" $ "monitor" .Values.monitoring.podMonitor "port" "http") */}}
{{- define "tidemark.endpoint" -}}
{{- $own := dict "port" .port "path" "/metrics" "interval" .monitor.interval -}}
{{- with .monitor.scrapeTimeout -}}{{- $_ := set $own "scrapeTimeout" . -}}{{- end -}}
{{- if eq .port "http" -}}
{{- $own = merge (include "tidemark.sidecar.scraped" .root | fromYaml) $own -}}
{{- end -}}
{{- toYaml (mergeOverwrite $own (deepCopy .monitor.endpoint)) -}}
{{- end -}}

{{/* The metadata of an object of the operator: (dict "root" $ "object" .Values.monitoring.podMonitor "suffix" "") */}}
{{- define "tidemark.monitoringMetadata" -}}
{{- include "tidemark.metadata" (dict "root" .root "component" "monitoring" "suffix" .suffix
  "namespace" .object.namespace "labels" .object.labels "annotations" .object.annotations) -}}
{{- end -}}
