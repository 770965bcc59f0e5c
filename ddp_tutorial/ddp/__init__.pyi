from .config import DDPConfig as DDPConfig
from .link import LinkModel as LinkModel
from .sync_bn import synchronise_batch_norm as synchronise_batch_norm
from .wrappers import BucketDDP as BucketDDP
from .wrappers import DataParallel as DataParallel
from .wrappers import FlatDDP as FlatDDP
from .wrappers import NaiveDDP as NaiveDDP
from .wrappers import data_parallel as data_parallel
