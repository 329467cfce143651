"""Functions of users, as files hold them: each returns or does something odd."""

HEAD = '''
import asyncio, os, sys
from collections import OrderedDict, UserDict
from decimal import Decimal
from fractions import Fraction
import numpy as np
from luyen.base.records import Score

def does(name, fault=SystemExit):
    """A class one of whose methods raises."""
    def method(self, *_): raise fault("from " + name)
    return type("Odd", (), {name: method})

class Quiet(float):
    def __float__(self): raise SystemExit(0)
class Text(str):
    def __eq__(self, other): raise KeyboardInterrupt
    __hash__ = str.__hash__
class Row(dict):
    def items(self): raise SystemExit(0)
    def __iter__(self): raise SystemExit(0)
    def keys(self): raise SystemExit(0)
class Nameless(type):
    @property
    def __name__(cls): raise SystemExit(0)
class Disguised:
    @property
    def __class__(self): raise SystemExit(0)
class Unprintable(Exception):
    def __str__(self): raise SystemExit(0)
class Loud(BaseException): pass
def deep():
    score = Score(name="a", value=1.0)
    for _ in range(5000): score = Score(name="a", value=1.0, parts=(score,))
    return score
def numbers():
    yield 1.0
async def later(value=1.0): return value
async def leaves(): sys.exit(0)
async def cancels(): raise asyncio.CancelledError
def fails(fault): raise fault

'''

TAKEN: dict[str, float] = {
    "1": 1.0,
    "True": 1.0,
    "0.5": 0.5,
    "-0.0": 0.0,
    "10**300": 1e300,
    "np.float32(0.5)": 0.5,
    "np.int8(3)": 3.0,
    "np.array(0.5)": 0.5,
    "Fraction(1, 4)": 0.25,
    "Decimal('0.5')": 0.5,
    "type('F', (float,), {})(0.5)": 0.5,
    "type('I', (int,), {})(2)": 2.0,
    "type('F', (float,), {'__repr__': lambda s: 1 / 0})(0.5)": 0.5,
    "type('F', (float,), {'__eq__': lambda s, o: 1 / 0, '__hash__': None})(0.5)": 0.5,
    "{'score': 1, Text('note'): 'let go'}": 1.0,
    "{Text('score'): 1}": 1.0,
    "OrderedDict(score=1)": 1.0,
    "UserDict(score=1)": 1.0,
    "{'score': 1, 'part \\ud800': 2}": 1.0,
    "Score(name=Text('mine'), value=np.float64(0.5))": 0.5,
    "Score(name='mine', value=1, parts=[Score(name='a', value=True)])": 1.0,
    "later()": 1.0,
    "np.complex128(1).real": 1.0,
}
"""What is returned -> the score."""

REFUSED: tuple[str, ...] = (
    "None",
    "'1'",
    "Text('1')",
    "b'1'",
    "[1.0]",
    "(1.0,)",
    "{1.0}",
    "{}",
    "{'acc': 1.0}",
    "{'score': None}",
    "{'score': 1.0, 'part': [1]}",
    "float('nan')",
    "-float('inf')",
    "np.float64('nan')",
    "10**400",
    "10**6000",
    "{'score': 10**6000}",
    "1j",
    "complex(1)",
    "np.complex128(1 + 2j)",
    "np.complex64(1)",
    "np.array(1 + 2j)",
    "np.zeros(2)",
    "numbers()",
    "numbers",
    "float",
    "iter([1])",
    "object()",
    "NotImplemented",
    "ValueError('a value')",
    "Quiet(1)",
    "{'score': Quiet(1)}",
    "Row(score=1)",
    "Nameless('Odd', (), {})()",
    "does('__float__')()",
    "does('__float__', KeyboardInterrupt)()",
    "does('__float__', GeneratorExit)()",
    "does('__float__', Loud)()",
    "does('__repr__')()",
    "does('__repr__', RecursionError)()",
    "does('__str__')()",
    "does('__eq__')()",
    "does('__hash__')()",
    "does('__len__')()",
    "does('__bool__')()",
    "does('__iter__')()",
    "{'score': does('__float__')()}",
    "{'score': does('__repr__')()}",
    "{does('__str__')(): 1.0, 'score': 1.0}",
    "type('S', (), {'__repr__': lambda s: Text('mine')})()",
    "type('S', (), {'__repr__': lambda s: '\\ud800' * 10**6})()",
    "type('S', (), {'__float__': lambda s: 'one'})()",
    "type('S', (), {'__float__': lambda s: float('inf')})()",
    "type('S', (), {'__index__': lambda s: 1 / 0})()",
    "Score(name='mine', value=None)",
    "Score(name='mine', value='1')",
    "Score(name='mine', value=Quiet(1))",
    "Score(name='mine', value=1.0, parts=(1.0,))",
    "Score(name='mine', value=1.0, weight=float('nan'))",
    "Score(name='mine', value=1.0, by_turn=((0.5, 1.0),))",
    "Score(name='mine', value=1.0, by_turn=5)",
    "Score(name=does('__str__')(), value=1.0)",
    "deep()",
    "later(None)",
    "later(does('__float__')())",
)
"""What is returned and is no score."""

FAULTS: dict[str, str] = {
    "sys.exit(0)": "SystemExit: 0",
    "sys.exit()": "SystemExit",
    "exit(0)": "SystemExit: 0",
    "fails(KeyboardInterrupt)": "KeyboardInterrupt",
    "fails(GeneratorExit)": "GeneratorExit",
    "fails(asyncio.CancelledError)": "CancelledError",
    "fails(StopIteration)": "StopIteration",
    "fails(StopAsyncIteration)": "StopAsyncIteration",
    "fails(MemoryError)": "MemoryError",
    "fails(RecursionError('deep'))": "RecursionError: deep",
    "fails(Loud('loud'))": "Loud: loud",
    "fails(Unprintable)": "Unprintable: it cannot be printed",
    "fails(BaseExceptionGroup('two', [SystemExit(0)]))": "BaseExceptionGroup: two",
    "leaves()": "SystemExit: 0",
    "cancels()": "CancelledError",
    "[does('__hash__')()][0] in {1}": "SystemExit: from __hash__",
    "Disguised()": "SystemExit: 0",
    "does('__getattribute__')()": "SystemExit: from __getattribute__",
    "len(does('__len__')())": "SystemExit: from __len__",
}
"""What is done -> how the fault begins."""
