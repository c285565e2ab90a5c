#!/bin/sh
# As in the official image.
# shellcheck disable=SC2086 # several options
exec java ${KAFKA_HEAP_OPTS-} -cp "/opt/kafka/libs/*" kafka.tools.StorageTool "$@"
