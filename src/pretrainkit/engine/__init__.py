"""One rank's training of a resolved run on NeMo and Lightning: the only package that imports them.

`rank` begins with run.json, `intact` checks the checkpoint, `train` is the sequence; `trainer` builds NeMo's objects,
`data_module` builds its datasets, `saving` writes one checkpoint, `child_processes` guards what a rank forks.

Order of the callbacks, which each hook follows:

1. `ReportProgress`: notes steps and phases for the watch over the ranks
2. `SeedWeights`: before the model is built
3. `VerifyRestoredState`: weights are NaN until loaded; step and sample are the planned ones
4. `OptimizerSettings`: learning rate, weight decay, betas and eps of the step
5. `LossGuard`: judges loss and gradient norm between the backward pass and the update
6. `UseCudaGraphs`: captures the layers
7. `InitialLossCheck`: only for a start from another model's weights; before steps are timed and signals only noted
8. `Fp8Check`, with FP8: weights are cast once a step; compares the loss with bf16's
9. `Recording`: numbers of a step, before the save that may follow it, so that saving isn't timed as a step
10. `StopEarly`: from its start on a signal means to finish the step and save
11. NeMo's own callbacks
12. `Evaluations`: the one before the first step, once layers and optimizer are prepared
13. `Checkpoints`: saves after what the callbacks above decided, a stop included
14. `DataLoaderWatchdog`, `FreezeGC`

What is replaced in NeMo, Lightning, Megatron and Python for a run, by the file that does it. `train`, `saving` and
`trainer` apply rows of the register (`megatron.patches`); the others change single objects, or Python's own:

| where | what | why |
|---|---|---|
| `nemo` | `override`, a module of Megatron that is gone | NeMo's imports fail with these versions |
| `train` | NeMo's `_fix_tensors_device` | asserts that there is a GPU |
| `trainer` | Lightning's signal handlers | they end a run before anything is saved |
| `child_processes` | `os.fork` | a forked Python can hang before its first instruction |
| `saving` | Megatron's `save_common`, `finish` and `save_config` | an error on the first rank alone hangs the others |
| `saving` | `_write_item` of Megatron's writer | to sum the bytes while they are written |
| `callbacks/progress` | `load_checkpoint` | to say that weights are being loaded |
| `before_steps` | `load_checkpoint`, `load_model_state_dict` | to find weights that were not loaded |
| `loss_guard` | `training_step`; the optimizer's `get_grad_norm`, `step_with_ready_grads` | to skip a bad update |
| `stop` | the epoch loop's `_should_check_val_fx` | Lightning counts from the start of the data loader |
| `data_module` | `build`, `_create_dataloader` | blends that change, samples of evaluations, samples left out |
| `recording` | the module's `log`, the evaluation loop's `run` | no waits for the GPU, no evaluation in a step's time |
| `loader_watchdog` | the evaluation loop's `reset` | it waits for DataLoader workers |
"""
