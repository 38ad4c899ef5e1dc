# One image for every role: docker build -t rankwatch .
FROM python:3.11-slim-bookworm AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY collectors collectors
COPY detectors detectors
COPY service service
COPY migrations migrations
# A folder that is copied as a whole into the image below: neither pip's cache nor the sources come along.
RUN python -m venv /opt/rankwatch \
 && /opt/rankwatch/bin/pip install --no-cache-dir --disable-pip-version-check -c constraints.txt '.[service,kafka,postgres,replay]'

FROM python:3.11-slim-bookworm
RUN useradd --uid 10001 --user-group --create-home --home-dir /var/lib/rankwatch rankwatch \
 && install -d -o rankwatch -g rankwatch -m 0700 /var/lib/rankwatch
COPY --from=build /opt/rankwatch /opt/rankwatch
ENV PATH=/opt/rankwatch/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    RANKWATCH_DATA_DIR=/var/lib/rankwatch
USER rankwatch
WORKDIR /var/lib/rankwatch
EXPOSE 8770
ENTRYPOINT ["rankwatch"]
CMD ["--help"]
