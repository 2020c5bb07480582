"""What the image runs: `serve` as SageMaker calls it, and any other command of peagle.

`docker run IMAGE serve` is `peagle serve --sagemaker`: port 8080, the model and vLLM's options from
the environment. Options given behind `serve` win over the environment.
"""

import signal
import sys

from peagle.cli.main import main

# Engine processes import this file again, and must not start another server.
if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        sys.argv.insert(2, "--sagemaker")
        # The first process of a container gets no signal that it has no handler for: so
        # `docker stop` ends it while it loads too. The server puts its own handler in place.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    main()
