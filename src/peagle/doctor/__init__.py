"""Why a draft head accepts less than it should: its files, its forward pass, and its serving."""
