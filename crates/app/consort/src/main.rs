//! consort: one large language model on the machines you already have.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    consort::main()
}
