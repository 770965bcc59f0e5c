"""Complete training scripts of about 100 lines each, to copy and adapt.

    python -m ddp_tutorial.examples.NAME                            in one process, or in ranks that the script starts
    torchrun --nproc-per-node 2 -m ddp_tutorial.examples.NAME       in ranks that torchrun starts

`digits` trains a convolutional network with synchronized BatchNorm on images. `finetune` trains a Hugging Face language
model on texts of different lengths. `plain` trains the same network as `digits` in plain PyTorch, without this package.
`ray_train` runs `digits` on ranks that Ray Train starts and monitors.
"""
