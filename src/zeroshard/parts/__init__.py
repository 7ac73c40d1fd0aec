"""Parts: weights, gradients and updater of one flat buffer, as protocols through which techniques reach the engine.

The engine composes parts and asks none of them which technique made it. Read `part`, `weights`, `gradients`, `updater`.
"""
