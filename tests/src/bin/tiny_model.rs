//! Writes the tests' tiny model to a file, to try things by hand: `cargo run -p llmd-tests --bin tiny_model -- PATH`.

use llmd_tests::tiny_model::TinyModel;
use std::process::ExitCode;

fn main() -> ExitCode {
    let Some(path) = std::env::args_os().nth(1) else {
        eprintln!("usage: tiny_model PATH");
        return ExitCode::from(2);
    };
    match TinyModel::default().write(path.as_ref()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cannot write {}: {error}", path.display());
            ExitCode::FAILURE
        }
    }
}
