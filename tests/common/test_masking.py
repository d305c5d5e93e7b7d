"""No secret stays in a command or a diff, and ordinary lines stay as they are."""

import pytest

from common.masking import masked_command, masked_diff, printable

HEX, BASE64 = "0123456789abcdef" * 3, "q7Rk2VbX9mZt4LwPc8Yd"

HIDDEN = [
    '+token: str = "SECRET"',
    '+token: Final[str] = f"{user}SECRET"',
    '+password = b"SECRET"',
    '+hubToken = "SECRET"',
    '+password = """SECRET\n+SECRET\n+"""\n+x = "stays"',
    '+token = (\n+    "SECRET"\n+)\n+x = "stays"',
    '+token = \\\n+    "SECRET"\n+x = "stays"',
    '+secrets = {\n+    "a": "SECRET",\n+    "b": "SECRET"}\n+x = "stays"',
    '+def load(\n+    token="SECRET",\n+) -> None:\n+    x = "stays"',
    "+password:\n+  SECRET\n+x: stays",
    "+password: |\n+  SECRET\n+x: stays",
    "+    'password': 'SECRET',",
    "+HUB_TOKEN=SECRET",
    "+export PASSWORD=SECRET",
    "+password: SECRET1",
    '+conn = "host=stays password=SECRET"',
    '+os.environ["HF_TOKEN"] = "SECRET"',
    '+x = os.environ.get("HF_TOKEN", "SECRET")',
    '+run(["--auth", "SECRET1"])',
    '+wandb.login(key="SECRET1")',
    f'+wandb.login("{HEX}")',
    f'+x = "{BASE64}"',
    "+headers = {'Authorization': 'Bearer SECRET'}",
    "+headers = {'Authorization': 'Token SECRET'}",
    "+h = 'Basic dXNlcjpwYXNzSECRET'",
    "+h = 'Authorization: Basic SECRET'",
    "+url = 'https://me:SECRET@SECRET@host/x'",
    "+url = 'https://host/stays?sig=SECRET&x=stays'",
    "+x = 'eyJSECRET12.eyJSECRET12.SECRET12_-'",
    "+x = 'SG.SECRET_SECRET_12.SECRET_SECRET_12'",
    "+x = 'stays;AccountKey=SECRET==;stays'",
    "+x = 'https://hooks.slack.com/services/T0/B0/SECRET'",
    "+x = 'hf_SECRET12345'",
    "+-----BEGIN RSA PRIVATE KEY-----\n+SECRET\n+-----END RSA PRIVATE KEY-----\n+x = 'stays'",
]
STAYS = [
    "+tokens = self.embedding(words)",
    "+    token: int64",
    "+max_tokens = 131072",
    "+key = values[key2]",
    '+tokenizer = AutoTokenizer.from_pretrained("gpt2")',
    '+author = "Me Myself"',
    "+# a basic implementation, in Basic English",
    "+weights = MobileNet_V3_Large_Weights.IMAGENET1K_V2",
    "+for key, value in sorted(items, key=lambda pair: pair[0]):",
    '+if key == "preprocessing_sha256":',
    '+def check(self, token: str) -> None:\n+    """Say it."""\n+    x = "y"',
    '+t = os.environ["HF_TOKEN"]',
    '+path = "runs/ddp_launch/2026-11-27T08-20-33Z/model.pt"',
    "+# the user's token isn't here",
    f"+    --hash=sha256:{HEX}",
    "index 0123456..89abcde 100644",
]


@pytest.mark.parametrize("written", HIDDEN)
def test_a_diff_keeps_no_secret(written: str) -> None:
    found = masked_diff(f"{written}\n+last = 'stays'\n")
    assert "***" in found
    for secret in ("SECRET", HEX, BASE64):
        assert secret not in found.replace("SECRETS", "")
    assert found.count("stays") == written.count("stays") + 1
    assert found.count("\n") == written.count("\n") + 2


def test_the_line_that_git_shows_above_a_change_keeps_no_secret() -> None:
    found = masked_diff("@@ -13,7 +13,7 @@ API_TOKEN = 'correcthorse'\n-x = 1\n+-- 1\n")
    assert found == "@@ -13,7 +13,7 @@ API_TOKEN = ***\n-x = 1\n+-- 1\n"
    assert "correct" not in masked_diff("--- password: 'correcthorse1'\n")


@pytest.mark.parametrize("written", STAYS)
def test_an_ordinary_line_of_a_diff_stays(written: str) -> None:
    assert masked_diff(f"{written}\n+x = 'last'") == f"{written}\n+x = 'last'"


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        ("--weights https://me:a@b@host/w.pt", "--weights https://***@host/w.pt"),
        ("--data-path 'https://abc@host/a b' --lr 1", "--data-path 'https://***@host/a b' --lr 1"),
        ("--hub-token abc123 --seed 1", "--hub-token *** --seed 1"),
        ("--password='abc 123' --seed 1", "--password=*** --seed 1"),
        ("'--password=abc 123' --seed 1", "--password=*** --seed 1"),
        ("""'--password=it'"'"'s abc' --seed 1""", "--password=*** --seed 1"),
        (
            "--auth abc --text 'https://h/x?sig=abc&y=1'",
            "--auth *** --text 'https://h/x?sig=***&y=1'",
        ),
        ("--hub.token abc123 --seed 1", "--hub.token *** --seed 1"),
        ("--hub-token 'ab '\"'\"'c 1' --seed 1", "--hub-token *** --seed 1"),
        ("--output-dir runs/hf_abc123456", "--output-dir runs/***"),
        *[
            (stays, stays)
            for stays in (
                "--output-dir runs/token/sk-1 --model a@b",
                "--max-tokens 100 --tokenizer gpt2 --num-key-value-heads 8",
                f"--weights /data/{HEX}/ResNet50_V2/resnet50-11ad3fa6.pth",
            )
        ],
    ],
)
def test_a_manifest_keeps_no_secret_of_the_command(typed: str, kept: str) -> None:
    assert masked_command(f"python -m recipes ddp_launch {typed}") == (
        f"python -m recipes ddp_launch {kept}"
    )


def test_a_name_is_printed_in_one_line_without_escape_sequences() -> None:
    name = "rosé 玫瑰\nerror: \x1b[2J\r\x9b31m\u2028\u202e\udcfc"
    assert printable(name) == r"rosé 玫瑰\nerror: \x1b[2J\r\x9b31m\u2028\u202e\udcfc"
