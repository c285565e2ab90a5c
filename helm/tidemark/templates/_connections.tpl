{{/* How every process reaches its servers: addresses as variables, secrets as files that follow their Secrets. */}}

{{/* The servers in force, as YAML: what the values name, or the trial's own. */}}
{{- define "tidemark.servers" -}}
{{- $name := include "tidemark.fullname" . -}}
{{- if .Values.trial.enabled -}}
kafka: {{ $name }}-kafka:9092
redis: redis://{{ $name }}-redis:6379/0
postgres: ""
postgresDsn: {name: {{ $name }}-trial, key: dsn}
postgresPassword: {name: ""}
{{- else -}}
kafka: {{ tpl .Values.kafka.bootstrapServers . | quote }}
redis: {{ tpl .Values.redis.url . | quote }}
postgres: {{ tpl .Values.postgres.dsn . | quote }}
postgresDsn: {{ toJson .Values.postgres.dsnSecret }}
postgresPassword: {{ toJson .Values.postgres.passwordSecret }}
{{- end -}}
{{- end -}}

{{/* The connection string's Secret of a role (pipeline, sidecar, migrations), as YAML; its name is empty where there is none. */}}
{{- define "tidemark.dsnSecret" -}}
{{- $own := dict "name" "" -}}
{{- if ne .role "pipeline" -}}
{{- $own = (index .root.Values .role).dsnSecret -}}
{{- end -}}
{{- toYaml (ternary $own (include "tidemark.servers" .root | fromYaml).postgresDsn (ne $own.name "")) -}}
{{- end -}}

{{/* Whether a role talks to Kafka: a sidecar only for the rows of the line protocol. */}}
{{- define "tidemark.needsKafka" -}}
{{- if or (has .role (list "pipeline" "topics" "test")) (and (eq .role "sidecar") (include "tidemark.speaksLines" .root)) -}}yes{{- end -}}
{{- end -}}

{{- define "tidemark.speaksLines" -}}
{{- if or .Values.sidecar.lines.enabled .Values.sidecar.lines.channel -}}yes{{- end -}}
{{- end -}}

{{/*
Secrets of a role as sources of a projected volume: (dict "root" $ "role" "pipeline"). Empty where it needs none.
Roles: pipeline, sidecar, migrations, topics, test.
*/}}
{{- define "tidemark.secretSources" -}}
{{- $v := .root.Values -}}
{{- $servers := include "tidemark.servers" .root | fromYaml -}}
{{- $files := list -}}
{{- if include "tidemark.needsKafka" . -}}
{{- $files = append $files (list $v.kafka.tls.caSecret.name $v.kafka.tls.caSecret.key "kafka/ca.crt") -}}
{{- $files = append $files (list $v.kafka.tls.clientCertificateSecret.name $v.kafka.tls.clientCertificateSecret.certificateKey "kafka/tls.crt") -}}
{{- $files = append $files (list $v.kafka.tls.clientCertificateSecret.name $v.kafka.tls.clientCertificateSecret.keyKey "kafka/tls.key") -}}
{{- $files = append $files (list $v.kafka.sasl.passwordSecret.name $v.kafka.sasl.passwordSecret.key "kafka/password") -}}
{{- $files = append $files (list $v.kafka.sasl.oauth.clientSecret.name $v.kafka.sasl.oauth.clientSecret.key "kafka/client-secret") -}}
{{- end -}}
{{- if has .role (list "pipeline" "sidecar" "test") -}}
{{- $files = append $files (list $v.redis.passwordSecret.name $v.redis.passwordSecret.key "redis/password") -}}
{{- $files = append $files (list $v.redis.sentinelPasswordSecret.name $v.redis.sentinelPasswordSecret.key "redis/sentinel-password") -}}
{{- $files = append $files (list $v.redis.caSecret.name $v.redis.caSecret.key "redis/ca.crt") -}}
{{- end -}}
{{- if has .role (list "pipeline" "sidecar" "migrations") -}}
{{- $dsn := include "tidemark.dsnSecret" . | fromYaml -}}
{{- $files = append $files (list $dsn.name $dsn.key "postgres/dsn") -}}
{{- if not $dsn.name -}}
{{- $files = append $files (list $servers.postgresPassword.name $servers.postgresPassword.key "postgres/password") -}}
{{- end -}}
{{- $files = append $files (list $v.postgres.tls.caSecret.name $v.postgres.tls.caSecret.key "postgres/ca.crt") -}}
{{- end -}}
{{- if has .role (list "sidecar" "test") -}}
{{- $files = append $files (list $v.sidecar.tokensSecret.name $v.sidecar.tokensSecret.key "sidecar/tokens") -}}
{{- end -}}
{{- range $files -}}
{{- if index . 0 }}
- secret:
    name: {{ index . 0 }}
    items:
      - key: {{ index . 1 }}
        path: {{ index . 2 }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The volume of a role's secrets, as an entry of `volumes`; empty where it needs none. */}}
{{- define "tidemark.secretVolume" -}}
{{- with include "tidemark.secretSources" . -}}
- name: {{ $.role }}-secrets
  projected:
    defaultMode: 0440
    sources:
      {{- . | trim | nindent 6 }}
{{- end -}}
{{- end -}}

{{/* No subPath: files mounted by one never follow their Secret. */}}
{{- define "tidemark.secretMount" -}}
{{- if include "tidemark.secretSources" . -}}
- name: {{ .role }}-secrets
  mountPath: /etc/tidemark/secrets
  readOnly: true
{{- end -}}
{{- end -}}

{{/* Variables of a role, as entries of `env`. */}}
{{- define "tidemark.env" -}}
{{- $v := .root.Values -}}
{{- $servers := include "tidemark.servers" .root | fromYaml -}}
{{- $files := "/etc/tidemark/secrets" -}}
{{- $env := list -}}
{{- if include "tidemark.needsKafka" . -}}
{{- $sasl := ne $v.kafka.sasl.mechanism "" -}}
{{- $env = append $env (list "KAFKA_BOOTSTRAP_SERVERS" $servers.kafka) -}}
{{- $env = append $env (list "KAFKA_FACTS_TOPIC" $v.kafka.topics.facts) -}}
{{- $env = append $env (list "KAFKA_CONTROL_TOPIC" $v.kafka.topics.control) -}}
{{- $env = append $env (list "KAFKA_DEAD_LETTERS_TOPIC" $v.kafka.topics.deadLetters) -}}
{{- $env = append $env (list "KAFKA_PARTITIONS" $v.topics.partitions) -}}
{{- $env = append $env (list "KAFKA_SECURITY_PROTOCOL" (printf "%s%s" (ternary "SASL_" "" $sasl) (ternary "SSL" "PLAINTEXT" $v.kafka.tls.enabled))) -}}
{{- if $v.kafka.tls.caSecret.name -}}
{{- $env = append $env (list "KAFKA_CA_FILE" (print $files "/kafka/ca.crt")) -}}
{{- end -}}
{{- if $v.kafka.tls.clientCertificateSecret.name -}}
{{- $env = append $env (list "KAFKA_SSL_CERTIFICATE_FILE" (print $files "/kafka/tls.crt")) -}}
{{- $env = append $env (list "KAFKA_SSL_KEY_FILE" (print $files "/kafka/tls.key")) -}}
{{- end -}}
{{- if $sasl -}}
{{- $env = append $env (list "KAFKA_SASL_MECHANISM" $v.kafka.sasl.mechanism) -}}
{{- if eq $v.kafka.sasl.mechanism "OAUTHBEARER" -}}
{{- $env = append $env (list "KAFKA_SASL_OAUTHBEARER_TOKEN_ENDPOINT_URL" $v.kafka.sasl.oauth.tokenEndpointUrl) -}}
{{- $env = append $env (list "KAFKA_SASL_OAUTHBEARER_CLIENT_ID" $v.kafka.sasl.oauth.clientId) -}}
{{- $env = append $env (list "KAFKA_SASL_OAUTHBEARER_CLIENT_SECRET_FILE" (print $files "/kafka/client-secret")) -}}
{{- with $v.kafka.sasl.oauth.scope -}}
{{- $env = append $env (list "KAFKA_SASL_OAUTHBEARER_SCOPE" .) -}}
{{- end -}}
{{- else -}}
{{- $env = append $env (list "KAFKA_USERNAME" $v.kafka.sasl.username) -}}
{{- $env = append $env (list "KAFKA_PASSWORD_FILE" (print $files "/kafka/password")) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if has .role (list "pipeline" "sidecar" "test") -}}
{{- $env = append $env (list "REDIS_URL" $servers.redis) -}}
{{- if $v.redis.passwordSecret.name -}}
{{- $env = append $env (list "REDIS_PASSWORD_FILE" (print $files "/redis/password")) -}}
{{- end -}}
{{- if $v.redis.sentinelPasswordSecret.name -}}
{{- $env = append $env (list "REDIS_SENTINEL_PASSWORD_FILE" (print $files "/redis/sentinel-password")) -}}
{{- end -}}
{{- if $v.redis.caSecret.name -}}
{{- $env = append $env (list "REDIS_CA_FILE" (print $files "/redis/ca.crt")) -}}
{{- end -}}
{{- end -}}
{{- if has .role (list "pipeline" "sidecar" "migrations") -}}
{{- if (include "tidemark.dsnSecret" . | fromYaml).name -}}
{{- $env = append $env (list "POSTGRES_DSN_FILE" (print $files "/postgres/dsn")) -}}
{{- else -}}
{{- $env = append $env (list "POSTGRES_DSN" $servers.postgres) -}}
{{- if $servers.postgresPassword.name -}}
{{- $env = append $env (list "POSTGRES_PASSWORD_FILE" (print $files "/postgres/password")) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $name, $text := $v.settings -}}
{{- $env = append $env (list $name $text) -}}
{{- end -}}
{{- range $env }}
- name: TIDEMARK_{{ index . 0 }}
  {{- /* As JSON: a number of a million would become 1e+06. */}}
  value: {{ kindIs "string" (index . 1) | ternary (index . 1) (index . 1 | toJson) | quote }}
{{- end }}
{{- if has .role (list "pipeline" "sidecar" "migrations") }}
- name: PGSSLMODE
  value: {{ $v.postgres.tls.mode }}
{{- if $v.postgres.tls.caSecret.name }}
- name: PGSSLROOTCERT
  value: {{ $files }}/postgres/ca.crt
{{- end }}
{{- end }}
{{- end -}}
