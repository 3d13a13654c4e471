# Jupyter for the problems' notebooks, with the library. compose.yaml's service `notebook` builds and runs it.
ARG BASE=worklog-base:local
FROM ${BASE}
USER 0
WORKDIR /worklog

# The first layer is the same in every problem's image.
COPY requirements/base.txt requirements/
RUN pip install --no-cache-dir --requirement requirements/base.txt
COPY requirements/notebooks.txt requirements/
RUN pip install --no-cache-dir --requirement requirements/notebooks.txt

COPY LICENSE README.md pyproject.toml ./
COPY src/ src/

USER 1000:1000
# On all of the container's addresses: compose.yaml gives them to 127.0.0.1 of the host alone, and the port's number.
ENTRYPOINT ["jupyter", "lab", "--ip=0.0.0.0", "--no-browser", "--notebook-dir=/worklog/problems"]
CMD ["--port=8888"]
