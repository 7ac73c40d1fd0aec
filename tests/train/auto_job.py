"""The main job with a plan that is chosen, on one of several ranks: prints its plan, and what it left."""

import json
import sys

from zeroshard.comm.mesh import init_mesh
from zeroshard.train import planning
from zeroshard.train.config import TrainConfig
from zeroshard.train.options import parse
from zeroshard.train.run import run
from zeroshard.train.sizes import SIZES, GPTConfig

SIZES["mini"] = GPTConfig(vocabulary=256, context=16, width=16, heads=2, layers=1)
config = parse(TrainConfig, sys.argv[1:], "zeroshard train")
mesh = init_mesh(60.0, "cpu")
if mesh.rank != 0:
    planning.best_plans = None  # only rank 0 may look
done = run(config, mesh)
if done is not None:
    print(json.dumps(str(done[1])))
