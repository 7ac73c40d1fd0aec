"""Families of transformers in pipelines of two and three stages, beside a plain loop: cut, refused, or different.

    python benchmarks/pipeline_families.py [--families NAME ...] [--json [FILE]]

Each tiny model is trained for three steps by SGD in two stages under 1F1B and in three under GPipe, and whole in one
process, on the same microbatches. Losses, the update of the first step and the weights after the last one
must be equal up to 1e-5 of the largest. Beside language models there are pairs of modalities and encoders of images.
The table has the blocks, the learned tensors that cross the boundary of two stages, and for refusals the reason. The
exit status is 1 if anything differed or failed without a reason.

With `--json` figures and table are kept as FILE and beside it with the ending .md, by default
benchmarks/results/pipeline-families-DATE.json.
"""

import argparse
import copy
import importlib
import json
import os
import sys
import time
import unittest.mock
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

import families  # noqa: E402
import torch  # noqa: E402
import transformers as hf  # noqa: E402
from ranks import circumstances  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers.utils import logging  # noqa: E402

import zeroshard as zs  # noqa: E402

STAGES, STEPS, MICROBATCHES, RATE, TOLERANCE = {2: "1f1b", 3: "gpipe"}, 3, 2, 0.02, 1e-5
REFUSALS = (zs.PlanError, zs.ModelError, zs.BatchError)
Batch = dict[str, Tensor]

WORDS = {"vocab_size": 64, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 2}
WORDS |= {"num_key_value_heads": 1, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2}
WORDS |= {"pad_token_id": 0}
SIGHT: dict[str, Any] = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
SIGHT |= {"image_size": 16, "patch_size": 8}
SOUND = {"vocab_size": 64, "d_model": 12, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2}
SOUND |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20, "num_mel_bins": 8}
SOUND |= {"max_source_positions": 16, "max_target_positions": 16, "pad_token_id": 0, "bos_token_id": 1}
SOUND |= {"eos_token_id": 2, "decoder_start_token_id": 1}
ROUTED = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
SECTIONS = {"rope_type": "default", "mrope_section": [1, 1, 1], "rope_theta": 1e4}
IMAGE, BEFORE, AFTER = 60, 61, 62  # tokens that stand for an image, and around it


def text(rows: int, places: int = 0) -> Batch:
    """Tokens below 32, `places` of which stand for an image."""
    tokens = torch.randint(3, 32, (rows, 12))
    tokens[:, 2 : 2 + places] = IMAGE
    return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}


def images(rows: int) -> Tensor:
    """Random images of 16 by 16."""
    return torch.randn(rows, 3, 16, 16)


def pairs(rows: int) -> Batch:
    """Texts and images, with the contrastive loss."""
    return {"input_ids": text(rows)["input_ids"], "pixel_values": images(rows), "return_loss": True}  # type: ignore[dict-item]


def qwen(rows: int) -> Batch:
    """Texts with an image of one token, whose patches come in one list."""
    made = text(rows, 1)
    seen = {"pixel_values": torch.randn(rows * 4, 96), "image_grid_thw": torch.tensor([[1, 2, 2]] * rows)}
    return {**made, **seen, "mm_token_type_ids": (made["input_ids"] == IMAGE).int()}


def gemma(rows: int) -> Batch:
    """Texts with an image of four tokens, and their kinds."""
    made = text(rows, 4)
    return {**made, "token_type_ids": (made["input_ids"] == IMAGE).long(), "pixel_values": images(rows)}


def deep(name: str, layers: int) -> nn.Module:
    """A language model with more layers than `families` gives it."""
    kinds = {"layers_block_type": ["linear_attention", "hybrid"] * 2 + ["linear_attention"]} if name == "zamba2" else {}
    more = {**families.OF_FAMILIES.get(name, {}), "num_hidden_layers": layers, "n_layer": layers, **kinds}
    with unittest.mock.patch.dict(
        families.OF_FAMILIES, {name: {k: v for k, v in more.items() if k != "hybrid_layer_ids"}}
    ):
        return families.build(name)


def words(name: str, rows: int) -> Batch:
    """Tokens and labels."""
    tokens = torch.randint(3, families.VOCABULARY, (rows, 9))
    return {"input_ids": tokens, "labels": tokens}


MORE: Mapping[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "clip": (
        lambda: hf.CLIPModel(hf.CLIPConfig(text_config=WORDS, vision_config=SIGHT, projection_dim=6)),
        pairs,
    ),
    "siglip": (
        lambda: hf.SiglipModel(hf.SiglipConfig(text_config={**WORDS, "projection_size": 12}, vision_config=SIGHT)),
        pairs,
    ),
    "llava": (
        lambda: hf.LlavaForConditionalGeneration(
            hf.LlavaConfig(
                text_config=hf.LlamaConfig(**WORDS), vision_config=hf.CLIPVisionConfig(**SIGHT), image_token_id=IMAGE
            )
        ),
        lambda rows: {**text(rows, 4), "pixel_values": images(rows)},
    ),
    "qwen2_vl": (
        lambda: hf.Qwen2VLForConditionalGeneration(
            hf.Qwen2VLConfig(
                text_config={**WORDS, "rope_parameters": SECTIONS},
                vision_config={
                    **{"depth": 2, "embed_dim": 16, "hidden_size": 12, "num_heads": 2, "patch_size": 4},
                    **{"spatial_merge_size": 2, "temporal_patch_size": 2, "mlp_ratio": 2},
                },
                **{"image_token_id": IMAGE, "vision_start_token_id": BEFORE, "vision_end_token_id": AFTER},
                video_token_id=63,
            )
        ),
        qwen,
    ),
    "gemma3": (
        lambda: hf.Gemma3ForConditionalGeneration(
            hf.Gemma3Config(
                text_config={**WORDS, "head_dim": 6, "sliding_window": 4},
                vision_config={**SIGHT, "vision_use_head": False},
                **{"mm_tokens_per_image": 4, "image_token_id": IMAGE, "boi_token_id": BEFORE, "eoi_token_id": AFTER},
            )
        ),
        gemma,
    ),
    "whisper": (
        lambda: hf.WhisperForConditionalGeneration(
            hf.WhisperConfig(**SOUND, begin_suppress_tokens=None, suppress_tokens=None)
        ),
        lambda rows: {"input_features": torch.randn(rows, 8, 32), "labels": torch.randint(3, 64, (rows, 6))},
    ),
    "vit": (
        lambda: hf.ViTForImageClassification(hf.ViTConfig(**SIGHT)),
        lambda rows: {"pixel_values": images(rows), "labels": torch.randint(0, 2, (rows,))},
    ),
    "swin": (
        lambda: hf.SwinForImageClassification(
            hf.SwinConfig(
                image_size=16, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4,
                drop_path_rate=0.0,
            )
        ),
        lambda rows: {"pixel_values": images(rows), "labels": torch.randint(0, 2, (rows,))},
    ),
    **{
        f"{name}, {layers} layers": (partial(deep, name, layers), partial(words, name))
        for name, layers in (("albert", 4), ("mamba2", 4), ("zamba2", 5), ("llama", 4), ("gpt2", 4), ("bert", 4))
    },
    "mixtral, router losses": (lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**WORDS, **ROUTED)), text),
    "qwen3_moe, router losses": (
        lambda: hf.Qwen3MoeForCausalLM(
            hf.Qwen3MoeConfig(**WORDS, **ROUTED, moe_intermediate_size=12, head_dim=6)
        ),
        text,
    ),
}  # fmt: skip


def build(name: str) -> nn.Module:
    """A tiny model without dropout."""
    if name not in MORE:
        return families.build(name)
    torch.manual_seed(0)
    return MORE[name][0]().train()


def batch(name: str, model: nn.Module, step: int) -> Batch:
    """The microbatch of a number."""
    torch.manual_seed(1000 + step)
    return MORE[name][1](2) if name in MORE else {k: v[:1] for k, v in families.batch(model, step).items()}


def trained(mesh: zs.Mesh, name: str) -> dict[str, Any]:
    """The result of one family, on one of the ranks."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    model = build(name)
    plain = copy.deepcopy(model)
    row: dict[str, Any] = {"class": type(model).__name__}
    try:
        cut = zs.Pipeline(mesh.ranks, schedule=STAGES[mesh.ranks], balance="parameters")
        plan = zs.Plan(pipeline_parallel=cut, microbatches=MICROBATCHES)
        make = partial(torch.optim.SGD, lr=RATE)
        engine = zs.Engine(model, make, plan, mesh=mesh, example=batch(name, plain, 0))
        chain = engine._stage.chain
        firsts = engine._stage.firsts[1:-1]
        row |= {"blocks": chain.blocks, "carried": [max(1, len(chain.carried.at(first))) for first in firsts]}
        row |= compared(engine, plain, name)
    except REFUSALS as error:
        return row | {"verdict": "refused", "why": str(error)}
    except Exception as error:
        return row | {"verdict": "failed", "why": f"{type(error).__name__}: {error}"}
    worst = max(row["losses"], row["gradients"], row["weights"])
    return row | {"verdict": "equal" if worst <= TOLERANCE else "differs"}


def compared(engine: Any, plain: Any, name: str) -> dict[str, Any]:
    """How far losses, the first update and weights are from those of a plain loop, relative to the largest."""
    optimizer = torch.optim.SGD(plain.parameters(), lr=RATE)
    far: dict[str, Any] = {"losses": 0.0}
    for step in range(STEPS):
        parts = [batch(name, plain, MICROBATCHES * step + n) for n in range(MICROBATCHES)]
        before = families.weights_of(plain)
        expected = 0.0
        for part in parts:
            loss = plain(**part).loss / MICROBATCHES
            loss.backward()
            expected += float(loss)
        optimizer.step()
        optimizer.zero_grad()
        found = engine.train_step(zs.Microbatches(parts)).loss
        far["losses"] = max(far["losses"], families.distance(expected - float(found)) / max(1.0, abs(expected)))
        if step in (0, STEPS - 1):
            worst, error, moved, largest = families.furthest(engine.state_dict(), plain, before)
            kind, scale = ("gradients", max(RATE, moved)) if step == 0 else ("weights", max(1.0, largest))
            far |= {kind: error / scale, f"worst of {kind}": worst}
    return far


def run(names: Sequence[str]) -> dict[str, Any]:
    """Train, and print a line for each family and number of stages."""
    from pool import Pool, WorkerError

    began, rows, pool = time.monotonic(), dict[str, Any](), Pool(max(STAGES), tuple(STAGES))
    target = importlib.import_module(Path(__file__).stem).trained  # the workers import it by this name
    for name in names:
        for stages in STAGES:
            if rows.get(name, {}).get(2, {}).get("blocks", stages) < stages:
                continue
            try:
                row = pool.run(target, stages, name)[0]
            except (WorkerError, AssertionError) as error:
                pool.stop()
                row = {"verdict": "failed", "why": str(error).strip().splitlines()[-1]}
            rows.setdefault(name, {})[stages] = row
            figures = ", ".join(f"{each} {row[each]:.0e}" for each in ("losses", "gradients", "weights") if each in row)
            carried = f"{row['blocks']} blocks, carried {row['carried']}" if "blocks" in row else ""
            print(f"{name:<28} {stages} stages  {row['verdict']:<8} {carried:<28} {figures}", flush=True)
            if "why" in row:
                print(f"    {row['why']}", flush=True)
    pool.stop()
    counts = {
        stages: dict(Counter(each[stages]["verdict"] for each in rows.values() if stages in each)) for stages in STAGES
    }
    for stages, found in counts.items():
        print(f"{stages} stages: " + ", ".join(f"{count} {verdict}" for verdict, count in found.items()))
    return {"families": rows, "counts": counts, "seconds": round(time.monotonic() - began)}


def markdown(kept: Mapping[str, Any]) -> str:
    """The table as it is kept."""
    lines = [
        f"{kept['cpu']}, {kept['cores']} cores, {kept['date']}; {kept['seconds']} s; torch {kept['torch']}, "
        f"transformers {kept['transformers']}; {STEPS} steps of {MICROBATCHES} microbatches.",
        "",
        *(f"- {n} stages, {STAGES[n]}: {', '.join(f'{v} {k}' for k, v in kept['counts'][n].items())}" for n in STAGES),
        "",
        "| Family | Stages | Verdict | Blocks | Tensors at the boundaries | Losses | Gradients | Weights | Why |",
        "|---|---:|---|---:|---|---:|---:|---:|---|",
    ]
    for name, of_stages in kept["families"].items():
        for stages, row in of_stages.items():
            figures = (f"{row[each]:.0e}" if each in row else "–" for each in ("losses", "gradients", "weights"))
            carried = ", ".join(map(str, row.get("carried", []))) or "–"
            why = row.get("why", "").replace("|", "/").replace("\n", " ")
            lines.append(
                f"| {name} | {stages} | {row['verdict']} | {row.get('blocks', '–')} | {carried} | "
                f"{' | '.join(figures)} | {why} |"
            )
    lines += ["", "Left out:", ""]
    lines += [f"- {name}: {why}" for name, why in families.LEFT_OUT.items() if name not in MORE]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run and keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--families", nargs="+", metavar="NAME", default=[*families.names(), *MORE])
    parser.add_argument("--json", nargs="?", const="", metavar="FILE", help="keep figures and table")
    options = parser.parse_args()
    kept = run(options.families)
    if options.json is not None:
        today = datetime.now(UTC).date().isoformat()
        kept |= circumstances() | {"date": today, "torch": torch.__version__, "transformers": hf.__version__}
        path = Path(options.json) if options.json else RESULTS / f"pipeline-families-{today}.json"
        path.write_text(json.dumps(kept, indent=1) + "\n")
        path.with_suffix(".md").write_text(markdown(kept))
    return int(any(found.keys() & {"differs", "failed"} for found in kept["counts"].values()))


if __name__ == "__main__":
    sys.exit(main())
