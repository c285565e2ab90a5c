# One image for the pipeline, its sidecar, Spark's executors and the migrations. It holds everything: a start downloads nothing.
# It runs as user 10001 with a read-only root; what it writes goes to TIDEMARK_HOME (/var/lib/tidemark) and /tmp: mount both.
# BASE needs Python 3.11 or newer with venv, and Debian's package JRE, Java 17 or newer.
ARG BASE=docker.io/library/python:3.11-slim-bookworm

FROM ${BASE} AS base
ARG JRE=openjdk-17-jre-headless
# The versions are the Debian release's own, patched by it: a pin would only keep a fixed hole open.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends "${JRE}" tini \
    && apt-get clean \
    && rm -rf /var/lib/apt/lists/* /var/log/*
# Java asks for the name of its user, so the number needs an entry.
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /var/lib/tidemark --shell /usr/sbin/nologin tidemark \
    && install --directory --owner tidemark --group tidemark /var/lib/tidemark

FROM base AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
# What changes seldom comes first: with the dependencies in a layer of their own, a new version of ours builds in seconds.
RUN python3 -m venv --without-pip /opt/tidemark \
    && python3 -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
extras = [project["optional-dependencies"][role] for role in ("writer", "relay", "reader", "pipeline", "sidecar")]; \
print(*project["dependencies"], *sum(extras, []), sep="\n")' >runtime.txt \
    && python3 -m pip --python /opt/tidemark/bin/python install --no-cache-dir --constraint constraints.txt --requirement runtime.txt
# The jars of Spark's Kafka source, by the Ivy that pyspark carries, as `tidemark up` does it.
COPY app/stack/ivy.xml /tmp/ivy.xml
RUN java -jar /opt/tidemark/lib/python3*/site-packages/pyspark/jars/ivy-*.jar -ivy /tmp/ivy.xml -confs connector -cache /tmp/ivy \
    -types jar bundle -retrieve '/opt/tidemark/jars/[conf]/[artifact]-[revision].[ext]'
COPY .src .src
COPY app app
COPY sinks sinks
COPY sources sources
COPY streaming streaming
RUN python3 -m pip --python /opt/tidemark/bin/python install --no-cache-dir --no-deps . \
    && python3 -m compileall -q /opt/tidemark/lib
COPY --chmod=755 helm/tools/executor /opt/tidemark/bin/tidemark-executor

FROM base
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG BASE
LABEL org.opencontainers.image.title="tidemark" \
    org.opencontainers.image.description="Tells every reader of an append-only log how far it may safely read" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}" \
    org.opencontainers.image.base.name="${BASE}"
COPY --from=build /opt/tidemark /opt/tidemark
ENV PATH=/opt/tidemark/bin:${PATH} \
    TIDEMARK_HOME=/var/lib/tidemark \
    TIDEMARK_SPARK_JARS=/opt/tidemark/jars/connector \
    TIDEMARK_LOG_FORMAT=json \
    TIDEMARK_METRICS_HOST=0.0.0.0 \
    TIDEMARK_SIDECAR_HOST=0.0.0.0
WORKDIR /var/lib/tidemark
USER 10001:10001
EXPOSE 9464 9480
# Spark's JVM has children that it does not wait for: tini does.
ENTRYPOINT ["tini", "--", "tidemark"]
CMD ["--help"]
