//! What is checked before a server listens: a wrong name of a model is an error at once.

use anyhow::{Context, Result, bail};
use model::Checkpoint;

use crate::store::name::ModelName;
use crate::store::{Settings, Store};

/// Checks that this is a model of this machine that can be opened, or the name of one that may be fetched.
pub fn check_model(model: &str) -> Result<()> {
    let is_local = matches!(model.parse()?, ModelName::Local(_));
    let Ok(files) = Store::from_environment()?.find(model) else {
        if Settings::from_environment()?.access()?.offline {
            bail!(
                "{model} is not on this machine, and HF_HUB_OFFLINE forbids to fetch it: `consort list` lists what is"
            );
        }
        return Ok(());
    };
    if is_local {
        Checkpoint::open(&files.path).context("open the model")?;
    }
    Ok(())
}
