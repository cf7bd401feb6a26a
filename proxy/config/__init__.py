"""Settings: declared once in groups.py, steps.py and root.py; read by load.py (flag > environment > TOML > default).

`Config` is the frozen object that everything reads; `load_config` makes one from what the user set, and checks it.
"""

from proxy.config.load import Loaded, load_config, load_settings
from proxy.config.root import STEPS_OF_PROFILE, Config, Key
from proxy.config.setting import SettingError

__all__ = ["STEPS_OF_PROFILE", "Config", "Key", "Loaded", "SettingError", "load_config", "load_settings"]
