# The demo in a container: docker build -t moe . && docker run --rm moe
FROM debian:12
COPY . /moe
WORKDIR /moe
# Builds, and trains one step, so that a run has the program.
RUN scripts/demo.sh --steps 1
ENTRYPOINT ["scripts/demo.sh"]
