# The image for all of it: pipeline, sidecar, Spark's executors, migrations, relays. It holds everything: a start downloads nothing.
# `--target services` is a smaller one without Java and Spark, for sidecars, relays and migrations alone.
# It runs as user 10001 with a read-only root; what it writes goes to TIDEMARK_HOME (/var/lib/tidemark) and /tmp: mount both.
# BASE needs Python 3.11 or newer with venv, and Debian's package JRE, Java 17 or newer.
ARG BASE=docker.io/library/python:3.11-slim-bookworm

FROM ${BASE} AS base
# The versions are the Debian release's own, patched by it: a pin would only keep a fixed hole open.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends binutils ca-certificates tini tzdata \
    && apt-get clean \
    && rm -rf /var/lib/apt/lists/* /var/log/*
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /var/lib/tidemark --shell /usr/sbin/nologin tidemark \
    && install --directory --owner tidemark --group tidemark /var/lib/tidemark

FROM base AS java
ARG JRE=openjdk-17-jre-headless
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends "${JRE}" libnss-wrapper \
    && apt-get clean \
    && rm -rf /var/lib/apt/lists/* /var/log/*

# A Java of the modules that Spark needs: half of the package. What the package's maintainers mend comes with the next build.
FROM base AS runtime
ARG JDK=openjdk-17-jdk-headless
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends "${JDK}" \
    && jlink --add-modules java.se,jdk.charsets,jdk.crypto.ec,jdk.incubator.vector,jdk.management,jdk.management.agent,jdk.naming.dns,jdk.net,jdk.security.auth,jdk.security.jgss,jdk.unsupported,jdk.zipfs \
        --strip-java-debug-attributes --no-header-files --no-man-pages --output /opt/java \
    && rm -f /opt/java/lib/libawt_xawt.so /opt/java/lib/libjawt.so /opt/java/lib/libsplashscreen.so \
    && /opt/java/bin/java -Xshare:dump \
    && cp --dereference --remove-destination /etc/ssl/certs/java/cacerts /opt/java/lib/security/cacerts

# Each role's dependencies, and what of them nobody here loads taken out again: helm/tools/trim.
FROM base AS build-services
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE NOTICE helm/tools/requirements helm/tools/trim ./
RUN python3 -m venv --without-pip /opt/tidemark \
    && python3 requirements relay reader sidecar >runtime.txt \
    && python3 -m pip --python /opt/tidemark/bin/python install --no-cache-dir --constraint constraints.txt --requirement runtime.txt \
    && ./trim /opt/tidemark
COPY tidemark tidemark
RUN python3 -m pip --python /opt/tidemark/bin/python install --no-cache-dir --no-deps . \
    && python3 -m compileall -q /opt/tidemark/lib
COPY helm/tools/root.py /tmp/
RUN python3 /tmp/root.py /root-of-image /opt/tidemark tini sh cat env head id ls sleep tail \
    && install --directory --owner tidemark --group tidemark /root-of-image/var/lib/tidemark

# No package manager and no Perl: what runs, and what that loads (helm/tools/root.py).
FROM scratch AS services
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="tidemark-services" \
    org.opencontainers.image.description="Tidemark's sidecar, relay and migrations, without Spark" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}"
COPY --from=build-services /root-of-image /
COPY --from=build-services /opt/tidemark /opt/tidemark
COPY LICENSE NOTICE /usr/share/doc/tidemark/
ENV PATH=/opt/tidemark/bin:/usr/local/bin:/usr/bin:/bin \
    LANG=C.UTF-8 \
    TIDEMARK_HOME=/var/lib/tidemark \
    TIDEMARK_LOG_FORMAT=json \
    TIDEMARK_SIDECAR_HOST=0.0.0.0
WORKDIR /var/lib/tidemark
USER 10001:10001
EXPOSE 9464 9480
ENTRYPOINT ["tini", "--", "tidemark"]
CMD ["--help"]

FROM java AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE NOTICE helm/tools/requirements helm/tools/trim ./
# What changes seldom comes first: with the dependencies in a layer of their own, a new version of ours builds in seconds.
RUN python3 -m venv --without-pip /opt/tidemark \
    && python3 requirements relay reader pipeline sidecar otel >runtime.txt \
    && python3 -m pip --python /opt/tidemark/bin/python install --no-cache-dir --constraint constraints.txt --requirement runtime.txt \
    && ./trim /opt/tidemark
COPY tidemark tidemark
RUN python3 -m pip --python /opt/tidemark/bin/python install --no-cache-dir --no-deps . \
    && python3 -m compileall -q /opt/tidemark/lib
COPY --chmod=755 helm/tools/executor /opt/tidemark/bin/tidemark-executor
COPY --chmod=755 helm/tools/named-user /opt/tidemark/bin/named-user
COPY --from=runtime /opt/java /opt/java
# With the Java that will run, at the place where it will be.
RUN JAVA_HOME=/opt/java /opt/tidemark/bin/python -m tidemark.app.pipeline.archive_classes \
    && /opt/tidemark/bin/python -m tidemark.app.pipeline.compile_ahead
COPY helm/tools/root.py /tmp/
# pyspark starts its JVM by scripts of bash, and Hadoop has chmod, ls and others do its work on files.
# hadolint ignore=SC2046,DL4006
RUN python3 /tmp/root.py /root-of-image /opt/tidemark,/opt/java tini sh bash $(dpkg -L coreutils | grep /bin/) /usr/lib/*/libnss_wrapper.so \
    && install --directory --owner tidemark --group tidemark /root-of-image/var/lib/tidemark

FROM scratch
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG BASE
LABEL org.opencontainers.image.title="tidemark" \
    org.opencontainers.image.description="Tells every reader of an append-only log how far it may safely read" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}" \
    org.opencontainers.image.base.name="${BASE}"
COPY --from=build /root-of-image /
COPY --from=runtime /opt/java /opt/java
COPY --from=build /opt/tidemark /opt/tidemark
COPY LICENSE NOTICE /usr/share/doc/tidemark/
ENV PATH=/opt/tidemark/bin:/opt/java/bin:/usr/local/bin:/usr/bin:/bin \
    LANG=C.UTF-8 \
    TIDEMARK_HOME=/var/lib/tidemark \
    TIDEMARK_LOG_FORMAT=json \
    TIDEMARK_METRICS_HOST=0.0.0.0 \
    TIDEMARK_SIDECAR_HOST=0.0.0.0
WORKDIR /var/lib/tidemark
USER 10001:10001
EXPOSE 9464 9480
# Spark's JVM has children that it does not wait for: tini does.
ENTRYPOINT ["tini", "--", "named-user", "tidemark"]
CMD ["--help"]
