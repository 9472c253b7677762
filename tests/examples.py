"""How many random examples of a property the tests try."""

import os

#: How many times as many as in the suite.
MORE = int(os.environ.get('DING_STORE_MORE_EXAMPLES', '1'))
