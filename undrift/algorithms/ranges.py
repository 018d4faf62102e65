"""What hyper-parameters may be. A field of one of these types is a float that a sweep may turn into a tensor."""

from typing import Annotated

from pydantic import Field

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Momentum = Annotated[float, Field(ge=0, le=1)]  # how much of the old stays
Fraction = Annotated[float, Field(gt=0, le=1)]  # how much of the new counts
