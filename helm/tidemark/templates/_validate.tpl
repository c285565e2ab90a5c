{{/* Checks of single values. Each renders nothing, or fails with a sentence. */}}

{{/* The format of one value: (dict "values" $v "keys" (list "image" "digest") "path" "image.digest" "format" $format) */}}
{{- define "tidemark.checkFormat" -}}
{{- $value := .values -}}
{{- range .keys -}}
{{- if kindIs "map" $value -}}{{- $value = get $value . -}}{{- else -}}{{- $value = "" -}}{{- end -}}
{{- end -}}
{{- if not (kindIs "invalid" $value) -}}
{{- $text := include "tidemark.text" $value -}}
{{- if not (regexMatch .format.pattern $text) -}}
{{- fail (printf "%s: %s is not %s" .path $text .format.expected) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Labels of the user must not replace labels of the chart: (dict "path" "commonLabels" "labels" $v.commonLabels) */}}
{{- define "tidemark.checkLabels" -}}
{{- range $name, $_ := .labels -}}
{{- if regexMatch "^(app[.]kubernetes[.]io/(name|instance|component|version|part-of|managed-by)|helm[.]sh/chart|tidemark/(serves|database))$" $name -}}
{{- fail (printf "%s: %s is a label of the chart itself: take it out" $.path $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The type and the range of a setting: (dict "name" "HISTORY_DAYS" "text" "14" "accepted" (dict "type" "integer")) */}}
{{- define "tidemark.checkSetting" -}}
{{- $type := .accepted.type | default "string" -}}
{{- $shown := printf "settings.%s: %s is not" .name .text -}}
{{- if .text -}}
{{- if and (eq $type "integer") (not (regexMatch "^-?[0-9]+$" .text)) -}}
{{- fail (print $shown " a whole number") -}}
{{- else if and (eq $type "number") (not (regexMatch "^-?[0-9]+([.][0-9]+)?$" .text)) -}}
{{- fail (print $shown " a number") -}}
{{- else if and (eq $type "boolean") (not (has (lower .text) (list "true" "false" "1" "0" "yes" "no" "on" "off"))) -}}
{{- fail (print $shown " true or false") -}}
{{- end -}}
{{- if has $type (list "integer" "number") -}}
{{- if and (hasKey .accepted "minimum") (lt (float64 .text) (float64 .accepted.minimum)) -}}
{{- fail (printf "%s at least %s" $shown (include "tidemark.text" .accepted.minimum)) -}}
{{- end -}}
{{- if and (hasKey .accepted "maximum") (gt (float64 .text) (float64 .accepted.maximum)) -}}
{{- fail (printf "%s at most %s" $shown (include "tidemark.text" .accepted.maximum)) -}}
{{- end -}}
{{- end -}}
{{- with .accepted.enum -}}
{{- if not (has $.text .) -}}
{{- fail (printf "%s one of %s" $shown (join ", " .)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
