//! What a test that lacks something does. It runs in a process of its own, because the environment decides.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::env;
use std::process::{Command, Output};

use testing::needs;

const ASKS: &str = "CONSORT_TEST_ASKS";

/// Asks twice for what is not there, where a test below has started it.
#[test]
fn asks() {
    if env::var_os(ASKS).is_some() {
        for _ in 0..2 {
            assert!(needs::cuda(Err::<(), _>("the driver sleeps")).is_none());
        }
        assert_eq!(needs::levels([1, 2], 2), [1, 2]);
    }
}

/// Runs the test above with the harness, which captures what tests print.
fn asked(required: &str) -> (Output, String) {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", "asks"]).env(ASKS, "").env("CONSORT_TEST_REQUIRE", required);
    let output = command.output().unwrap();
    let printed = [&output.stdout[..], &output.stderr].concat();
    (output, String::from_utf8(printed).unwrap())
}

#[test]
fn what_is_lacking_is_said_once_and_the_test_passes() {
    for required in ["", "browser", "amx,npm,"] {
        let (output, printed) = asked(required);
        assert!(output.status.success(), "{printed}");
        let line = "did not run: needs::asks: no cuda (the driver sleeps)\n";
        assert_eq!(printed.matches(line).count(), 1, "{printed}");
    }
}

#[test]
fn what_is_required_and_lacking_fails() {
    let (output, printed) = asked("npm,cuda");
    assert!(!output.status.success() && printed.contains("needs::asks needs cuda: the driver sleeps"), "{printed}");
}

#[test]
fn a_name_that_does_not_exist_is_refused() {
    let (output, printed) = asked("cuda,gpu");
    assert!(!output.status.success() && printed.contains("names \"gpu\", which is none of avx2, "), "{printed}");
}
