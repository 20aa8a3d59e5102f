from kvtier.cache.lease import Lease as Lease
from kvtier.cache.shared import Prompt as Prompt
from kvtier.cache.shared import SharedCache as SharedCache
from kvtier.cache.shared import open_cache as open_cache
from kvtier.cache.tokens import Cache as Cache
from kvtier.connectors.transformers import attach as attach
from kvtier.core.config import CacheConfig as CacheConfig
from kvtier.core.errors import CacheError as CacheError
from kvtier.core.errors import Closed as Closed
from kvtier.core.errors import ConfigError as ConfigError
from kvtier.core.errors import DeviceError as DeviceError
from kvtier.core.errors import LayoutError as LayoutError
from kvtier.core.errors import TierError as TierError
from kvtier.core.errors import UsageError as UsageError
from kvtier.core.hints import Hint as Hint
from kvtier.core.hints import Retain as Retain
from kvtier.core.keys import Namespace as Namespace
from kvtier.core.keys import token_labels as token_labels
from kvtier.devices import find_device as find_device
from kvtier.layout import full_attention as full_attention
from kvtier.layout import latent_attention as latent_attention
from kvtier.layout import opaque as opaque
from kvtier.tiers import DeviceTier as DeviceTier

__version__: str
