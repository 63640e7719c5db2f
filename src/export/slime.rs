//! slime's debug-rollout files: `<rollout>.pt` for each policy version, a dict with the samples of its groups.

use serde_json::{Value, json};

use super::ExportError;
use super::output::{Output, close};
use super::pickle::Pickle;
use super::rows::Row;

/// The file of the policy version that is being written.
#[derive(Default)]
pub(super) struct Slime {
    open: Option<(u64, Pickle, u64)>,
    rollouts: u64,
    rows: u64,
}

impl Slime {
    pub(super) fn write(&mut self, row: &Row<'_>, output: &mut Output) -> Result<(), ExportError> {
        let version = row.episode.version.unwrap_or(0);
        if self.open.as_ref().is_none_or(|(open, _, _)| *open != version) {
            self.close(output)?;
            let file = output.create_in(&format!("{}.pt", self.rollouts))?;
            let pickle = self.begin(file).map_err(output.failed())?;
            self.open = Some((version, pickle, 0));
        }
        let index = self.rows;
        self.rows += 1;
        match &mut self.open {
            Some((_, pickle, rows)) => {
                *rows += 1;
                sample(pickle, row, index).map_err(output.failed())
            }
            None => Ok(()),
        }
    }

    fn begin(&self, file: std::io::BufWriter<std::fs::File>) -> std::io::Result<Pickle> {
        let mut pickle = Pickle::new(file)?;
        pickle.dict()?;
        pickle.text("rollout_id")?;
        pickle.int(self.rollouts)?;
        pickle.text("samples")?;
        pickle.list()?;
        Ok(pickle)
    }

    fn close(&mut self, output: &mut Output) -> Result<(), ExportError> {
        let Some((version, mut pickle, rows)) = self.open.take() else { return Ok(()) };
        let ended = pickle.end_list().and_then(|()| pickle.end_dict()).and_then(|()| pickle.end());
        ended.and_then(close).map_err(output.failed())?;
        output.tell(json!({"rollout_id": self.rollouts, "policy_version": version, "rows": rows}));
        self.rollouts += 1;
        Ok(())
    }

    pub(super) fn end(mut self, output: &mut Output) -> Result<(), ExportError> {
        self.close(output)
    }
}

/// A dict as `Sample.to_dict` gives it. Fields that are not known are left out: slime has defaults for them.
fn sample(pickle: &mut Pickle, row: &Row<'_>, index: u64) -> std::io::Result<()> {
    let tokens = &row.sample.token_ids;
    let response_length = tokens.len() - row.prompt_len();
    pickle.dict()?;
    let known = json!({
        "group_index": row.episode.group, "index": index, "rollout_id": row.episode.number,
        "response_length": response_length, "reward": row.episode.reward,
        "weight_versions": row.versions().iter().map(ToString::to_string).collect::<Vec<_>>(),
        "remove_sample": row.episode.is_masked, "session_id": row.session,
        "status": if row.is_truncated { "truncated" } else { "completed" },
        "metadata": Value::Object(row.columns()),
    });
    for (name, value) in known.as_object().into_iter().flatten() {
        pickle.text(name)?;
        pickle.json(value)?;
    }
    pickle.text("tokens")?;
    pickle.list()?;
    tokens.iter().try_for_each(|id| pickle.int(u64::from(*id)))?;
    pickle.end_list()?;
    pickle.text("loss_mask")?;
    pickle.list()?;
    row.mask().try_for_each(|is_trained| pickle.int(u64::from(is_trained)))?;
    pickle.end_list()?;
    pickle.text("rollout_log_probs")?;
    pickle.list()?;
    row.logprobs().try_for_each(|logprob| pickle.float(f64::from(logprob)))?;
    pickle.end_list()?;
    if let Some(experts) = &row.experts {
        let shape = experts.shape();
        let shape = [shape.rows, shape.layers, shape.top_k];
        pickle.text("rollout_routed_experts")?;
        pickle.array(&shape.map(u64::from), &experts.as_i32())?;
    }
    pickle.end_dict()
}
