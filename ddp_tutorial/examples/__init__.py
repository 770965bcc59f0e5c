"""Whole programs to copy as a start, each one file of at most 100 lines.

    python -m ddp_tutorial.examples.NAME                            one process, or as many as it starts itself
    torchrun --nproc-per-node 2 -m ddp_tutorial.examples.NAME       the ranks that torchrun has started

`digits` is a convolutional net with synchronised BatchNorm on images, `finetune` a Hugging Face language model on text
of varying length. `plain` is the training of `digits` once more, in torch alone, without this package. `ray_train` is
it as well, on ranks that Ray Train starts and watches.
"""
