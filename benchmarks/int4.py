"""Products with 4-bit weights (W4A16, group 128, zero points) beside their peers, in microseconds.

    python benchmarks/int4.py [--results FOLDER]

Each call takes another copy of the weight, so that the L2 is cold; times are those of CUDA graphs. In this process:
torch's tinygemm (`_weight_int4pack_mm`) and cuBLAS on bfloat16 weights. `recorded`: Marlin and Machete of vLLM 0.24.0
on one H200, measured once and not in this run. `error`: against float64 on the dequantised weight.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from gpu_timing import copies_for, microseconds, print_table, relative_error, write_results
from torch.nn.functional import linear

from pegboard.devices import device_facts
from pegboard_quant.int4.launching import Int4Launcher
from pegboard_quant.int4.layout import tile
from pegboard_quant.int4.tables import cuts_for
from pegboard_quant.packed.rounding import round_to_nearest
from pegboard_quant.packed.weight import dense

SHAPES = ((6144, 4096), (28672, 4096), (4096, 14336))
ROWS = (1, 16, 64, 256, 4096)
GROUP = 128
#: (Marlin, Machete) by rows and shape
RECORDED = {
    1: ((10.7, 15.5), (29.5, 27.6), (20.8, 23.6)),
    16: ((11.6, 15.6), (30.0, 27.5), (21.7, 23.6)),
    64: ((21.4, 30.4), (51.2, 43.4), (37.0, 28.3)),
    256: ((42.7, 27.8), (180, 97.3), (91.3, 57.4)),
    4096: ((583, 307), (2790, 1677), (1266, 894)),
}


def run() -> list[dict[str, Any]]:
    mm = torch.ops.aten._weight_int4pack_mm
    launcher = Int4Launcher(torch.cuda.get_device_capability(), cuts_for(device_facts("cuda"), None))
    found = []
    for place, (outputs, inputs) in enumerate(SHAPES):
        weight = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * 0.02
        packed = round_to_nearest(weight, 4, GROUP, symmetric=False)
        exact = dense(packed)
        tiled = [tile(packed) for _ in range(copies_for(packed.nbytes))]
        plain = [exact.bfloat16() for _ in range(copies_for(weight.nbytes))]
        # tinygemm's layout: bytes of two codes, then its own order; scale and zero point of each group and output
        bytes_ = torch.randint(0, 256, (outputs, inputs // 2), device="cuda", dtype=torch.uint8)
        tiny = [torch.ops.aten._convert_weight_to_int4pack(bytes_, 8) for _ in range(len(tiled))]
        steps = torch.rand(inputs // GROUP, outputs, 2, device="cuda", dtype=torch.bfloat16) * 0.02
        for rows in ROWS:
            x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
            out = torch.empty(rows, outputs, device="cuda", dtype=torch.bfloat16)
            launcher.multiply(x, tiled[0], None, out)
            error = relative_error(out, x.double() @ exact.double().T)
            ours = microseconds([lambda w=w, x=x, out=out: launcher.multiply(x, w, None, out) for w in tiled])
            cublas = microseconds([lambda w=w, x=x: linear(x, w) for w in plain])
            tinygemm = None
            if rows <= 256:
                tinygemm = microseconds([lambda w=w, x=x, steps=steps: mm(x, w, GROUP, steps) for w in tiny], 1.0, 3)
            marlin, machete = RECORDED[rows][place]
            best = min(peer for peer in (marlin, machete, tinygemm) if peer is not None)
            found.append(
                {
                    "rows": rows,
                    "outputs x inputs": f"{outputs} x {inputs}",
                    "us": ours,
                    "tinygemm us": tinygemm,
                    "cublas bfloat16 us": cublas,
                    "marlin us, recorded": marlin,
                    "machete us, recorded": machete,
                    "of best INT4 peer": ours / best,
                    "of cublas": ours / cublas,
                    "error": error,
                }
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "h200")
    chosen = parser.parse_args()
    with torch.inference_mode():
        rows = run()
    print_table(rows)
    print(write_results("int4", rows, chosen.results))


if __name__ == "__main__":
    main()
