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

{{/*
How a role reaches its database, as YAML: of dsn, dsnSecret and dsnFile one is not empty, and `value` is the value that
says so. Roles: pipeline, sidecar, migrations, synapse, and with a "database" relay, relay-follow and relay-migrations.
*/}}
{{- define "tidemark.postgres" -}}
{{- $servers := include "tidemark.servers" .root | fromYaml -}}
{{- $none := dict "name" "" -}}
{{- $found := dict "dsn" "" "dsnSecret" $none "dsnFile" "" "passwordSecret" $none "tls" .root.Values.postgres.tls -}}
{{- if hasPrefix "relay" .role -}}
{{- $value := printf "relay.databases[%s]" .database.name -}}
{{- $_ := set $found "tls" .database.tls -}}
{{- if eq .role "relay-migrations" -}}
{{- $found = merge (dict "dsnSecret" .database.migrate.dsnSecret "value" (print $value ".migrate.dsnSecret")) $found -}}
{{- else -}}
{{- $found = merge (pick .database "dsn" "dsnSecret" "dsnFile" "passwordSecret") (dict "value" $value) $found -}}
{{- end -}}
{{- else if and (has .role (list "sidecar" "migrations")) (index .root.Values .role).dsnSecret.name -}}
{{- $found = merge (dict "dsnSecret" (index .root.Values .role).dsnSecret "value" (print .role ".dsnSecret")) $found -}}
{{- else -}}
{{- $value := ternary "postgres.dsnSecret" "postgres.dsn" (ne $servers.postgresDsn.name "") -}}
{{- $found = merge (dict "dsn" $servers.postgres "dsnSecret" $servers.postgresDsn "passwordSecret" $servers.postgresPassword "value" $value) $found -}}
{{- end -}}
{{- toYaml $found -}}
{{- end -}}

{{/* Who a role is to Kafka: kafka.sasl and kafka.tls, with the relays' own user in them where there is one. */}}
{{- define "tidemark.kafkaUser" -}}
{{- $kafka := .root.Values.kafka -}}
{{- $found := dict "username" $kafka.sasl.username "passwordSecret" $kafka.sasl.passwordSecret "clientCertificateSecret" $kafka.tls.clientCertificateSecret "value" "kafka.sasl" -}}
{{- if eq .role "relay" -}}
{{- $own := .root.Values.relay.kafka -}}
{{- if $own.username -}}
{{- $found = merge (dict "username" $own.username "passwordSecret" $own.passwordSecret "value" "relay.kafka") $found -}}
{{- end -}}
{{- if $own.clientCertificateSecret.name -}}
{{- $_ := set $found "clientCertificateSecret" $own.clientCertificateSecret -}}
{{- end -}}
{{- end -}}
{{- toYaml $found -}}
{{- end -}}

{{/* Whether an address has a password in it: before the @, among the words, or behind the question mark. */}}
{{- define "tidemark.holdsPassword" -}}
{{- if or (regexMatch "://[^/?#]*:[^/?#]*@" .) (regexMatch "password\\s*=" .) -}}yes{{- end -}}
{{- end -}}

{{/* Whether a role talks to Kafka: a sidecar only for the rows of the line protocol. */}}
{{- define "tidemark.needsKafka" -}}
{{- if or (has .role (list "pipeline" "topics" "test" "relay" "synapse")) (and (eq .role "sidecar") (include "tidemark.speaksLines" .root)) -}}yes{{- end -}}
{{- end -}}

{{- define "tidemark.speaksLines" -}}
{{- if or .Values.sidecar.lines.enabled .Values.sidecar.lines.channel -}}yes{{- end -}}
{{- end -}}

{{/*
Files of a role's Secrets, as YAML: (dict "root" $ "role" "pipeline"). `value` is the value of the chart that names the Secret.
Roles: pipeline, sidecar, migrations, topics, test, synapse, and with a "database" relay, relay-follow and relay-migrations.
*/}}
{{- define "tidemark.secretFiles" -}}
{{- $v := .root.Values -}}
{{- $user := include "tidemark.kafkaUser" . | fromYaml -}}
{{- $files := list -}}
{{- if include "tidemark.needsKafka" . -}}
{{- $files = append $files (list $v.kafka.tls.caSecret.name $v.kafka.tls.caSecret.key "kafka/ca.crt" "kafka.tls.caSecret") -}}
{{- $files = append $files (list $user.clientCertificateSecret.name $user.clientCertificateSecret.certificateKey "kafka/tls.crt" "kafka.tls.clientCertificateSecret") -}}
{{- $files = append $files (list $user.clientCertificateSecret.name $user.clientCertificateSecret.keyKey "kafka/tls.key" "kafka.tls.clientCertificateSecret") -}}
{{- $files = append $files (list $user.passwordSecret.name $user.passwordSecret.key "kafka/password" (print $user.value ".passwordSecret")) -}}
{{- $files = append $files (list $v.kafka.sasl.oauth.clientSecret.name $v.kafka.sasl.oauth.clientSecret.key "kafka/client-secret" "kafka.sasl.oauth.clientSecret") -}}
{{- end -}}
{{- if has .role (list "pipeline" "sidecar" "test" "relay-follow") -}}
{{- $files = append $files (list $v.redis.passwordSecret.name $v.redis.passwordSecret.key "redis/password" "redis.passwordSecret") -}}
{{- $files = append $files (list $v.redis.sentinelPasswordSecret.name $v.redis.sentinelPasswordSecret.key "redis/sentinel-password" "redis.sentinelPasswordSecret") -}}
{{- $files = append $files (list $v.redis.caSecret.name $v.redis.caSecret.key "redis/ca.crt" "redis.caSecret") -}}
{{- end -}}
{{- if has .role (list "pipeline" "sidecar" "migrations" "synapse" "relay" "relay-follow" "relay-migrations") -}}
{{- with include "tidemark.postgres" . | fromYaml -}}
{{- $connection := trimSuffix ".dsn" .value -}}
{{- $files = append $files (list .dsnSecret.name .dsnSecret.key "postgres/dsn" .value) -}}
{{- $files = append $files (list .passwordSecret.name .passwordSecret.key "postgres/password" (print $connection ".passwordSecret")) -}}
{{- $files = append $files (list .tls.caSecret.name .tls.caSecret.key "postgres/ca.crt" (print (hasPrefix "relay" $.role | ternary $connection "postgres") ".tls.caSecret")) -}}
{{- end -}}
{{- end -}}
{{- if has .role (list "sidecar" "test") -}}
{{- $files = append $files (list $v.sidecar.tokensSecret.name $v.sidecar.tokensSecret.key "sidecar/tokens" "sidecar.tokensSecret") -}}
{{- end -}}
{{- if eq .role "synapse" -}}
{{- $files = append $files (list $v.synapse.dsnSecret.name $v.synapse.dsnSecret.key "synapse/dsn" "synapse.dsnSecret") -}}
{{- $files = append $files (list $v.synapse.redisUrlSecret.name $v.synapse.redisUrlSecret.key "synapse/redis" "synapse.redisUrlSecret") -}}
{{- end -}}
{{- if eq .role "sidecar" -}}
{{- $files = append $files (list $v.sidecar.tls.secret.name $v.sidecar.tls.secret.certificateKey "sidecar/tls.crt" "sidecar.tls.secret") -}}
{{- $files = append $files (list $v.sidecar.tls.secret.name $v.sidecar.tls.secret.keyKey "sidecar/tls.key" "sidecar.tls.secret") -}}
{{- else if eq .role "test" -}}
{{- $files = append $files (list $v.sidecar.tls.caSecret.name $v.sidecar.tls.caSecret.key "sidecar/ca.crt" "sidecar.tls.caSecret") -}}
{{- end -}}
{{- range $files -}}
{{- if index . 0 }}
- {secret: {{ index . 0 | quote }}, key: {{ index . 1 | quote }}, path: {{ index . 2 }}, value: {{ index . 3 | quote }}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Secrets of a role as sources of a projected volume. Empty if the role needs none. With "hook" true a Secret may be missing. */}}
{{- define "tidemark.secretSources" -}}
{{- range include "tidemark.secretFiles" . | fromYamlArray }}
- secret:
    name: {{ .secret }}
    {{- if $.hook }}
    optional: true
    {{- end }}
    items:
      - key: {{ .key }}
        path: {{ .path }}
{{- end -}}
{{- end -}}

{{/*
The command of a hook's container: (dict "root" $ "role" "migrations" "hook" true "program" (list "tidemark")). If a Secret is
missing, it says which one.
*/}}
{{- define "tidemark.hookCommand" -}}
command:
  - tini
  - --
  {{- with include "tidemark.secretFiles" . | fromYamlArray }}
  - python
  - -c
  - |
    {{- $.root.Files.Get "files/wait_for_secrets.py" | nindent 4 }}
  {{- range . }}
  - {{ printf "/etc/tidemark/secrets/%s=the Secret %s/%s does not exist or has no key %s: create it, or change the value %s" .path $.root.Release.Namespace .secret .key .value | quote }}
  {{- end }}
  - --
  {{- end }}
  {{- range .program }}
  - {{ . }}
  {{- end }}
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
{{- $user := include "tidemark.kafkaUser" . | fromYaml -}}
{{- $env := list -}}
{{- if include "tidemark.needsKafka" . -}}
{{- $sasl := ne $v.kafka.sasl.mechanism "" -}}
{{- $env = append $env (list "KAFKA_BOOTSTRAP_SERVERS" $servers.kafka) -}}
{{- $env = append $env (list "KAFKA_FACTS_TOPIC" $v.kafka.topics.facts) -}}
{{- $env = append $env (list "KAFKA_CONTROL_TOPIC" $v.kafka.topics.control) -}}
{{- $env = append $env (list "KAFKA_DEAD_LETTERS_TOPIC" $v.kafka.topics.deadLetters) -}}
{{- with $v.kafka.topics.positions -}}
{{- $env = append $env (list "KAFKA_POSITIONS_TOPIC" .) -}}
{{- end -}}
{{- $env = append $env (list "KAFKA_PARTITIONS" $v.topics.partitions) -}}
{{- $env = append $env (list "KAFKA_SECURITY_PROTOCOL" (printf "%s%s" (ternary "SASL_" "" $sasl) (ternary "SSL" "PLAINTEXT" $v.kafka.tls.enabled))) -}}
{{- if $v.kafka.tls.caSecret.name -}}
{{- $env = append $env (list "KAFKA_CA_FILE" (print $files "/kafka/ca.crt")) -}}
{{- end -}}
{{- if $user.clientCertificateSecret.name -}}
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
{{- $env = append $env (list "KAFKA_USERNAME" $user.username) -}}
{{- $env = append $env (list "KAFKA_PASSWORD_FILE" (print $files "/kafka/password")) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if has .role (list "pipeline" "sidecar" "test" "relay-follow") -}}
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
{{- if eq .role "synapse" -}}
{{- $env = append $env (list "SYNAPSE_DSN_FILE" (print $files "/synapse/dsn")) -}}
{{- $env = append $env (list "SYNAPSE_REDIS_URL_FILE" (print $files "/synapse/redis")) -}}
{{- end -}}
{{- $postgres := dict -}}
{{- if has .role (list "pipeline" "sidecar" "migrations" "synapse" "relay" "relay-follow" "relay-migrations") -}}
{{- $postgres = include "tidemark.postgres" . | fromYaml -}}
{{- if $postgres.dsnSecret.name -}}
{{- $env = append $env (list "POSTGRES_DSN_FILE" (print $files "/postgres/dsn")) -}}
{{- else if $postgres.dsnFile -}}
{{- $env = append $env (list "POSTGRES_DSN_FILE" $postgres.dsnFile) -}}
{{- else -}}
{{- $env = append $env (list "POSTGRES_DSN" $postgres.dsn) -}}
{{- if $postgres.passwordSecret.name -}}
{{- $env = append $env (list "POSTGRES_PASSWORD_FILE" (print $files "/postgres/password")) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $name, $text := $v.settings -}}
{{- $env = append $env (list $name $text) -}}
{{- end -}}
{{- range $env }}
- name: TIDEMARK_{{ index . 0 }}
  value: {{ include "tidemark.text" (index . 1) | quote }}
{{- end }}
{{- with $postgres }}
- name: PGSSLMODE
  value: {{ .tls.mode }}
{{- if .tls.caSecret.name }}
- name: PGSSLROOTCERT
  value: {{ $files }}/postgres/ca.crt
{{- end }}
{{- end }}
{{- end -}}
