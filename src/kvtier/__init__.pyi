from kvtier.cache import Cache as Cache
from kvtier.config import CacheConfig as CacheConfig
from kvtier.connectors.transformers import attach as attach
from kvtier.devices import find_device as find_device
from kvtier.errors import CacheError as CacheError
from kvtier.errors import Closed as Closed
from kvtier.errors import ConfigError as ConfigError
from kvtier.errors import DeviceError as DeviceError
from kvtier.errors import LayoutError as LayoutError
from kvtier.errors import TierError as TierError
from kvtier.errors import UsageError as UsageError
from kvtier.hints import Hint as Hint
from kvtier.hints import Retain as Retain
from kvtier.keys import Namespace as Namespace
from kvtier.keys import token_labels as token_labels
from kvtier.layout import full_attention as full_attention
from kvtier.layout import latent_attention as latent_attention
from kvtier.layout import opaque as opaque
from kvtier.prompts.lease import Lease as Lease
from kvtier.shared_cache import Prompt as Prompt
from kvtier.shared_cache import SharedCache as SharedCache
from kvtier.shared_cache import open_cache as open_cache
from kvtier.tiers import DeviceTier as DeviceTier

__version__: str
