"""normlab: which norm placement trains stably, how deep, and which layer breaks first when it does not."""
