"""The platform: clock, transports, memory and disk of a rank, real or rehearsed; no other room sees a rehearsal.

Read `accelerator` (the device, as torch reaches it), `transport` and `shared_memory` (bytes between ranks), `real`
(clock, network, memory, disk and tasks of this machine), then `rehearsed` (one rank without the others, on a clock of
predicted time). Nothing is imported here, because `real` imports modules that need `accelerator`.
"""
