"""A plugin through which every process of a cluster learns whether it is to die."""

from tests.kill.remote import arm_as_told

arm_as_told()
