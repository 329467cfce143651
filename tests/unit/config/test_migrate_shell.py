"""Shell scripts: variables, arithmetic, arrays, branches and quotes, without a shell."""

import pytest

from luyen.base.errors import UserError
from luyen.config.migrate.shell import command_words, open_names, shown

HEAD = "python3 -m verl.trainer.main_ppo"


def words(text: str) -> list[str]:
    return command_words(text)[3:]


@pytest.mark.parametrize(
    ("script", "word"),
    [
        ("n=8", "a.b=$n"),
        ("n=8", "a.b=${n}"),
        ("n=8", 'a.b="$n"'),
        ("export n=8", "a.b=$n"),
        ("n=4", "a.b=$((n * 2))"),
        ("n=4", "a.b=$(( (n + 4) ))"),
        ("", "a.b=${n:-8}"),
        ("m=8", 'a.b=${n:-"${m}"}'),
        ("n=8", "a.b=${n:-3}"),
        ("m=1\nn=$((m * 16 / 2))", "a.b=$n"),
        ("n=x/8", 'a.b=$(basename "$n")'),
        ("n=8/x", "a.b=$(dirname $n)"),
        ("n=8", 'a.b="$(realpath "${n}")"'),
    ],
)
def test_variables_have_their_values(script: str, word: str):
    assert words(f"{script}\n{HEAD} {word} $@") == ["a.b=8"]


def test_quotes_and_lists_are_those_of_a_shell():
    text = f"""p=$HOME/x
files="['$p/a', '$p/b']"
{HEAD} a="$files" b=['c','d'] e='["f","$g"]' h=i\\ j k='l # m' # n=o
"""
    assert words(text) == [*("a=['~/x/a', '~/x/b']", "b=[c,d]", 'e=["f","$g"]', "h=i j", "k=l # m")]


def test_lines_are_continued_and_comments_between_them_left_out():
    text = f"{HEAD} \\\n  a=1 \\\n  # b=2 \\\n  c=3\\\n  d=4 $@\n\n  # e=5\n"
    assert words(text) == ["a=1", "c=3", "d=4"]


def test_arrays_give_several_words():
    text = f'N=4\nDATA=(\n  data.a=$N\n  "data.b=x y"\n)\n{HEAD} "${{DATA[@]}}" c=1'
    assert words(text) == ["data.a=4", "data.b=x y", "c=1"]


@pytest.mark.parametrize(("mode", "chat"), [("async", "True"), ("sync", "False")])
def test_branches_that_the_script_decides_are_taken(mode: str, chat: str):
    text = f"""mode="{mode}"
if [ "$mode" = "async" ]; then
    chat="True"
else
    chat="False"
fi
{HEAD} a=$chat
"""
    assert words(text) == [f"a={chat}"]


@pytest.mark.parametrize("word", ["a=$1", "a=$GONE", "a=$(hostname)", "a=$((GONE + 1))"])
def test_what_only_a_shell_knows_stays_open(word: str):
    [found] = words(f"{HEAD} {word}")
    assert open_names(found) == [word[2:]]
    assert shown(found) == word


def test_the_last_command_that_trains_is_taken():
    text = f"python prepare.py a.b=1\n{HEAD} a.b=2\n{HEAD} a.b=3\necho a.b=4\n"
    assert words(text) == ["a.b=3"]
    with pytest.raises(UserError, match="no training command"):
        command_words("python prepare.py a.b=1")


def test_numbers_beyond_reason_are_not_computed():
    [found] = words(f"{HEAD} a=$((9999999999999 * 9999999999999))")
    assert open_names(found) != []


@pytest.mark.parametrize(
    "line",
    [
        "cd x && {} && echo a.b=2; other a.b=3 &",
        "{} 2>&1 | tee log.txt a.b=2",
        "if [ 1 = 1 ]; then {}; else {} a.b=2; fi",
        "{} &> log.txt || exit a.b=2",
    ],
)
def test_words_of_other_commands_on_the_line_are_left_out(line: str):
    text = line.format(f"{HEAD} a.b='1; x' \"c=2 | 3\"", HEAD)
    assert [word for word in words(text) if "=" in word] == ["a.b=1; x", "c=2 | 3"]


def test_several_assignments_on_a_line_and_comments_in_arrays_are_read():
    text = f'A=1; B=2\nC=(\n  a=$A  # first\n  b=$B\n)\n{HEAD} ${{C[@]}} "${{C[@]}}"'
    assert words(text)[-2:] == ["a=1", "b=2"]


def test_scripts_that_grow_without_bound_are_refused():
    with pytest.raises(UserError, match="more than 200,000 characters"):
        words("A=xxxxxxxxxx\n" + "A=$A$A\n" * 40 + f"{HEAD} a=$A")
    with pytest.raises(UserError, match="more than 200,000 characters"):
        words(f"{HEAD} a=" + "x" * 300_000)


def test_a_variable_outside_of_quotes_gives_as_many_words_as_it_has():
    blocks = "n=4\nMODEL=\"\n    a.b=$n \\\n    c.d=[x] \\\n    e.f='{g: 1}'\""
    blocks += '\nBOTH="$MODEL h.i=2"\nNONE=""'
    assert words(f"{blocks}\n{HEAD} j.k=1 $BOTH $NONE l.m=2") == [
        *("j.k=1", "a.b=4", "c.d=[x]", "e.f='{g:", "1}'", "h.i=2", "l.m=2")
    ]
    assert words(f'x="a b"\ny=$x\n{HEAD} c="$y" d=$y') == ["c=a b", "d=a", "b"]


def test_text_in_quotes_may_have_several_lines_and_documents_are_no_code():
    text = f"""cat <<EOF
don't read "this
EOF
echo "it isn't" # nor it's end
A="
    a.b=1
    # a.b=2
    c.d=2
"
{HEAD} $A
"""
    assert words(text) == ["a.b=1", "c.d=2"]


def test_a_quote_that_never_ends_hides_no_command():
    assert words(f"echo it's\n{HEAD} a=1") == ["a=1"]
