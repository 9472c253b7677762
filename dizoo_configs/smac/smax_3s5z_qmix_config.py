"""
QMIX on SMAX's 3s5z: smac_3s5z_qmix_config.py with another battle. Its results are SMAX's, not SMAC's.

Run it in the config pipeline:

> ding -m serial -c dizoo_configs/smac/smax_3s5z_qmix_config.py -s 0
"""

import copy

from dizoo_configs.smac import smac_3s5z_qmix_config as smac
from dizoo_configs.smac.smax import on_smax

main_config, create_config = copy.deepcopy((smac.main_config, smac.create_config))
on_smax(main_config, create_config)
