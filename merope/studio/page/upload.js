// Files for the server. It reads them in the page's folder, says what is odd about them, and keeps no file.

// kind: "path", "video" or "cameras"; model: the number of the model that it is fitted to.
export async function upload(session, kind, file, model, isMetric) {
  const words = new URLSearchParams({ name: file.name, model, metric: isMetric ? "1" : "0" });
  try {
    const answer = await fetch(`/sessions/${session}/${kind}?${words}`, { method: "POST", body: file });
    if (!answer.ok) return { problem: (await answer.text()).trim() };
    return { notes: (await answer.json()).notes };
  } catch {
    return { problem: "the file did not reach the server: is it larger than allowed, or is the connection lost?" };
  }
}
