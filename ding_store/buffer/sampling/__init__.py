"""Which rows, and when: samplers, limits of use and age, the rate limiter, sampling ahead."""
