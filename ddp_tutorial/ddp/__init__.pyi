from .link import LinkModel as LinkModel
from .sync_bn import synchronise_batch_norm as synchronise_batch_norm
from .variants import BucketDDP as BucketDDP
from .variants import DataParallel as DataParallel
from .variants import DDPConfig as DDPConfig
from .variants import FlatDDP as FlatDDP
from .variants import NaiveDDP as NaiveDDP
from .variants import data_parallel as data_parallel
