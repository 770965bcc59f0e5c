"""Public issues and pull requests about the museum's bugs, from PyTorch and other well-known projects."""

_GITHUB = "https://github.com/"

# URLs by exhibit. Each thread reports the bug or its consequences. Several of these bugs were fixed long ago.
ISSUES = {
    name: _GITHUB + thread
    for name, thread in {
        "averages_weights": "pytorch/pytorch/issues/187268",
        "clips_before_unscaling": "Lightning-AI/pytorch-lightning/issues/9599",
        "goes_past_the_wrapper": "jingyaogong/minimind/issues/853",
        "enables_sync_after_the_forward_pass": "karpathy/build-nanogpt/pull/30",
        "adds_micro_batches_up": "karpathy/nanoGPT/issues/168",
        "steps_at_zero": "rasbt/LLMs-from-scratch/issues/299",
        "leaks_into_the_next_epoch": "timoschick/pet/issues/36",
        "never_sets_the_epoch": "kan-bayashi/ParallelWaveGAN/issues/177",
        "splits_by_rank": "Lightning-AI/pytorch-lightning/issues/7728",
        "reads_all_on_each_rank": "innnky/so-vits-svc/issues/70",
        "draws_the_same_noise": "huggingface/transformers/issues/37932",
        "evaluates_padding": "pytorch/pytorch/issues/25162",
        "stops_on_its_own_loss": "Lightning-AI/pytorch-lightning/issues/379",
        "counts_its_own_batches": "pytorch/pytorch/issues/33148",
        "continues_after_any_error": "pytorch/pytorch/issues/44353",
        "names_a_folder_each": "ashleve/lightning-hydra-template/issues/393",
        "forgets_the_optimizer": "EvolvingLMMs-Lab/OneVision-Encoder/pull/65",
        "runs_the_saved_epoch_again": "facebookresearch/FFCV-SSL/pull/3",
        "takes_the_newest_file": "NVIDIA-NeMo/Speech/pull/52",
        "writes_over_the_last_one": "Lightning-AI/pytorch-lightning/issues/688",
        "loads_nothing": "pytorch/examples/issues/1029",
        "drops_the_shuffle_buffer": "huggingface/datasets/pull/8408",
        "averages_means": "dnouri/nolearn/issues/247",
        "validates_a_shard": "cybertronai/transformer-xl/issues/14",
    }.items()
}
