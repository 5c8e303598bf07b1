"""compose.yaml: the Compose Specification's schema, and that the three services fit together.

`compose-spec.json` is the schema of github.com/compose-spec/compose-spec at 170098b (Apache-2.0).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from monitoring import ROOT

DOCKER = ROOT / "docker"
TEXT = (DOCKER / "compose.yaml").read_text()
SERVICES = yaml.safe_load(TEXT)["services"]
SCHEMA = jsonschema.Draft7Validator(json.loads((Path(__file__).parent / "compose-spec.json").read_text()))


def test_the_schema_holds() -> None:
    SCHEMA.validate(yaml.safe_load(TEXT))


@pytest.mark.parametrize("wrong", [{"ulimits": {"memlock": []}}, {"healtcheck": {}}, {"ports": 30000}])
def test_the_schema_finds_mistakes(wrong: dict[str, Any]) -> None:
    document = yaml.safe_load(TEXT)
    document["services"]["sglang"] |= wrong
    with pytest.raises(jsonschema.ValidationError):
        SCHEMA.validate(document)


def test_the_server_runs_as_the_readme_says() -> None:
    server = SERVICES["sglang"]
    assert server["ipc"] == "host"
    assert server["ulimits"] == {"memlock": -1}
    (device,) = server["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert {"--sparse-decode", "--enable-metrics"} <= set(server["command"])
    assert (DOCKER / server["build"]["context"]).resolve() == ROOT
    assert (ROOT / server["build"]["dockerfile"]).exists()


def test_images_are_pinned() -> None:
    for name, service in SERVICES.items():
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]), name


def test_ports_are_bound_to_this_host() -> None:
    for service in SERVICES.values():
        for port in service["ports"]:
            assert port.startswith("127.0.0.1:"), port


def test_what_is_mounted_is_there() -> None:
    for service in SERVICES.values():
        for volume in service["volumes"]:
            if volume.startswith("./"):
                assert (DOCKER / volume.split(":")[0]).is_dir(), volume
            elif not volume.startswith("$"):
                assert volume.split(":")[0] in yaml.safe_load(TEXT)["volumes"]


def test_variables_are_documented_and_required_ones_say_so() -> None:
    readme = (DOCKER / "README.md").read_text()
    for name, what in re.findall(r"\$\{(\w+)(:[?-])", TEXT):
        assert f"`{name}`" in readme, name
        assert what in (":?", ":-")


def test_prometheus_scrapes_the_server_and_grafana_reads_prometheus() -> None:
    config = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    port = re.search(r"SGLANG_SPARSE_PORT=(\d+)", (DOCKER / "Dockerfile").read_text())
    assert port
    assert job["static_configs"] == [{"targets": [f"sglang:{port[1]}"]}]
    assert job.get("metrics_path", "/metrics") == "/metrics"
    assert config["rule_files"] == ["alerts.yml"]
    provisioning = DOCKER / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "sglang_sparse.yaml").read_text())["providers"]
    mounts = dict(volume.split(":")[:2] for volume in SERVICES["grafana"]["volumes"])
    assert mounts["./grafana/dashboards"] == provider["options"]["path"]
