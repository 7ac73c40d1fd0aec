"""Parts: weights, gradients and updater of one flat buffer, as protocols through which techniques reach the engine.

The engine composes parts without regard to the technique behind them. Read `part`, `weights`, `gradients`, `updater`.
"""
